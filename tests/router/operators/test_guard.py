"""Web pages of other sites reach nothing at ports that ask for no key, whatever name leads there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common.site_guard import why_not
from tests.router.endpoints.test_admin_port import METHODS
from tests.router.rig.helpers import ScriptedEngine, answers, running

OURS = (
    *("127.0.0.1:8081", "10.1.2.3", "[::1]:8081", "[fd00::1]", "localhost:8081", "gateway", "gateway-admin:8081"),
    *(
        "gateway-admin.prod.svc",
        "gateway.prod.svc.cluster.local:8081",
        "gw.localhost",
        "vm.europe.internal",
        "gateway.",
    ),
)
OTHERS = (
    *(
        "evil.example",
        "evil.example:8081",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "gateway.svc.evil.example",
    ),
    *("1.2.3.4.nip.io", "", ":8081", "[::1", "[evil.example]", "evil.example@127.0.0.1.x", "127.0.0.1, evil.example"),
)
SITES = ("cross-site", "same-site", "same-origin", "none")
CROSS_SITE: dict[str, dict[str, str]] = {
    "another site": {"Origin": "https://evil.example"},
    "a sandbox": {"Origin": "null"},
    "another port": {"Origin": "http://127.0.0.1:1"},
    "a browser says so": {"Sec-Fetch-Site": "cross-site"},
    "another name of the site": {"Sec-Fetch-Site": "same-site"},
    "a link that posts": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
}


@pytest.mark.parametrize("host", OURS)
def test_a_name_that_no_public_dns_gives_out_is_ours(host: str) -> None:
    assert why_not("POST", {"Host": host}) is None


@pytest.mark.parametrize("host", OTHERS)
def test_any_other_name_is_refused(host: str) -> None:
    for method in ("GET", "POST"):
        assert "Host" in (why_not(method, {"Host": host}) or "")
    assert why_not("GET", {"Host": "gw1.example.com:8081"}, ("gw1.example.com",)) is None


@given(
    st.sampled_from(OURS + OTHERS),
    st.sampled_from(["GET", "POST", "DELETE"]),
    st.dictionaries(
        st.sampled_from(["Origin", "Sec-Fetch-Site", "Sec-Fetch-Mode"]),
        st.sampled_from(
            ["http://127.0.0.1:8081", "http://evil.example", "null", "cross-site", "same-origin", "navigate"]
        ),
    ),
)
def test_nothing_that_changes_something_is_done_for_another_site(host: str, method: str, said: dict[str, str]) -> None:
    if why_not(method, {"Host": host, **said}) is None and method != "GET":
        assert said.get("Origin") in (None, f"http://{host}")
        assert said.get("Sec-Fetch-Site") in (None, "same-origin", "none")


@pytest.mark.parametrize("how", CROSS_SITE)
async def test_the_operators_port_does_nothing_for_another_site(how: str) -> None:
    engine = ScriptedEngine("a", answers(200))
    async with running(engine) as gateway:

        async def ask(method: str, path: str, sent: Mapping[str, str]) -> tuple[int, Any]:
            url = gateway.admin_url + path
            async with gateway.session.request(method, url, headers=sent, json={"model": "m", "prompt": "x"}) as got:
                return got.status, await got.read()

        paths = {**METHODS, "/ui/state": "GET"}
        for path, method in paths.items():
            open_to_all = path == "/metrics" or (method == "GET" and "Sec-Fetch-Mode" in CROSS_SITE[how])
            status, body = await ask(method, path, CROSS_SITE[how])
            assert status == (200 if open_to_all else 403), path
            assert open_to_all or b'"cross_site"' in body
            assert (await ask(method, path, {"Host": "evil.example"}))[0] == (200 if path == "/metrics" else 403)
        assert engine.resets == 0
        own = gateway.admin_url
        assert (await ask("POST", "/reset_prefix_cache", {"Origin": own, "Sec-Fetch-Site": "same-origin"}))[0] == 200
        assert engine.resets == 1
