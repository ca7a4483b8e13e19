"""Flags override the environment, which overrides the file. Every refusal names field, value and remedy."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pytest
from pydantic import AfterValidator, Field

from engine.common.settings import ConfigError, HasEffect, Settings, check_redis_url, group


class Example(Settings):
    """An example program."""

    config: str | None = Field(None, description="YAML file with any of these settings")
    port: int = Field(8000, ge=0, le=65535, description="TCP port; 0 for any free one")
    engines: list[str] = Field([], description="base URLs, comma-separated")
    redis_url: Annotated[str, AfterValidator(check_redis_url)] | None = Field(None, description="URL of a Redis")
    policy: Literal["round_robin", "least_loaded"] = Field("round_robin", description="routing policy")
    admin: bool = Field(False, description="serve the admin endpoints")
    deadline_s: float = Field(30.0, gt=0, description="deadline in seconds")


def load(*argv: str, **environ: str) -> Example:
    return Example.load(argv, prog="example", environ=environ)


def test_defaults() -> None:
    assert load() == Example()


def test_flags_come_before_environment_before_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("port: 1\npolicy: least_loaded\ndeadline-s: 3\nengines: [http://file]\nadmin: true\n")
    got = load("--config", str(file), "--port", "3", WARMROUTE_PORT="2", WARMROUTE_DEADLINE_S="4")
    assert (got.port, got.deadline_s, got.policy, got.engines, got.admin) == (
        3,
        4.0,
        "least_loaded",
        ["http://file"],
        True,
    )
    assert load(WARMROUTE_CONFIG=str(file)).policy == "least_loaded"


@pytest.mark.parametrize("given", [["--engines", "http://a,http://b"], ["--engines=http://a,http://b"]])
def test_lists_are_comma_separated(given: list[str]) -> None:
    assert load(*given).engines == ["http://a", "http://b"]
    assert load(WARMROUTE_ENGINES="http://a, http://b").engines == ["http://a", "http://b"]


def test_switches() -> None:
    assert load("--admin").admin
    assert not load("--no-admin", WARMROUTE_ADMIN="true").admin
    assert load(WARMROUTE_ADMIN="1").admin


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        (["--port", "70000"], {}, ["--port", "70000", "65535"]),
        (["--port", "x"], {}, ["--port", "'x'", "integer", "TCP port"]),
        (["--policy", "best"], {}, ["--policy", "best", "round_robin", "least_loaded"]),
        (["--prot", "1"], {}, ["--prot", "did you mean '--port'"]),
        (["--deadline-s", "0"], {}, ["--deadline-s", "'0'", "greater than 0", "seconds"]),
        (["--port"], {}, ["--port"]),
        (["stray"], {}, ["stray"]),
        ([], {"WARMROUTE_PORT": "x"}, ["WARMROUTE_PORT", "'x'", "integer"]),
        ([], {"WARMROUTE_PROT": "1"}, ["WARMROUTE_PROT", "did you mean 'WARMROUTE_PORT'"]),
        ([], {"WARMROUTE_MODE": "1"}, ["WARMROUTE_MODE is unknown; allowed: ", "WARMROUTE_POLICY, WARMROUTE_PORT"]),
        (["--config", "/does/not/exist.yaml"], {}, ["/does/not/exist.yaml"]),
    ],
)
def test_refusals_name_field_value_and_what_is_allowed(
    argv: list[str], environ: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        load(*argv, **environ)
    assert all(word in str(refused.value) for word in words), str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 1", ["prot", "did you mean 'port'"]),
        ("port: abc", ["port", "'abc'", "integer"]),
        ("- port", ["mapping"]),
        ("port: [", ["cannot be read"]),
        ("host: 2024-13-01", ["cannot be read", "month"]),
        ("port: " + "1" * 5000, ["cannot be read", "digits"]),
        ("host: !!bool x", ["a value cannot be read", "KeyError"]),
        ("port: 1\nhost: b\nport: 2", ["'port' occurs twice, on lines 1 and 3"]),
        ("deadline_s: 1\ndeadline-s: 2", ["'deadline_s' occurs twice, on lines 1 and 2"]),
        ("host: " + "[" * 2000 + "]" * 2000, ["cannot be read", "recursion"]),
        ("config: other.yaml", ["key 'config' is unknown; allowed: admin, deadline_s"]),
    ],
)
def test_refusals_in_a_file(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load("--config", str(file))
    assert all(word in str(refused.value) for word in [*words, str(file)]), str(refused.value)


@pytest.mark.parametrize("text", ['redis_url: "a\\0b"', 'redis_url: "\\ud800"'])
def test_a_text_that_nothing_can_hold_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"--redis-url: got a text with a zero byte, or one that is not UTF-8"):
        load("--config", str(file))
    with pytest.raises(ConfigError, match=r"--redis-url: got a text"):
        load(WARMROUTE_REDIS_URL="a\udcff")
    with pytest.raises(ConfigError, match=r"--redis-url: got a text"):
        load("--redis-url", "a\udcff")


@pytest.mark.parametrize(
    "url",
    [
        "redis://redis:6379",
        "redis://:secret@redis/0?health_check_interval=5",
        "rediss://user:pass@redis:6380",
        "unix:///run/redis.sock?db=1",
        "redis+sentinel://a,b:26380,[::1]:26379/main",
        "rediss+sentinel://user:pass@a/main/1?ssl_ca_certs=/ca.crt&sentinel_password=x",
    ],
)
def test_a_redis_url_that_a_client_can_be_made_of(url: str) -> None:
    assert load("--redis-url", url).redis_url == url


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("localhost:6379", "must begin with redis://"),
        ("http://redis", "must begin with redis://"),
        ("redis://", "must name a host"),
        ("redis://redis:99999", "range"),
        ("redis://redis?sockettimeout=1", "sockettimeout"),
        ("redis://redis?socket_timeout=soon", "socket_timeout"),
        ("rediss://redis?ssl_cert_reqs=perhaps", "perhaps"),
        ("unix:///run/redis.sock?db=first", "db"),
        ("redis+sentinel://a,b", "must name the master after the Sentinels, as in redis+sentinel://HOST:26379/NAME"),
        ("redis+sentinel://a,,b/main", "'' is not the address of a Sentinel"),
        ("redis+sentinel://a:99999/main", "range"),
        ("redis+sentinel://a/main?sockettimeout=1", "sockettimeout"),
    ],
)
def test_a_redis_url_of_which_no_client_can_be_made_is_refused(url: str, why: str) -> None:
    """Otherwise the bad URL would end the task that connects, and the program would run without a registry."""
    with pytest.raises(ConfigError) as refused:
        load("--redis-url", url)
    assert why in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:s3cret@redis:99999",
        "redis://user:s3cret@redis?x=1",
        "redis://:s3/cr@t@redis",
        "redis+sentinel://:s3/cr@redis/m",
    ],
)
def test_a_refusal_does_not_show_a_password(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load("--redis-url", url)
    assert "***@redis" in str(refused.value)
    assert "s3" not in str(refused.value)


def test_every_bad_value_is_listed_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        load("--port", "x", "--policy", "y")
    assert "--port" in str(refused.value)
    assert "--policy" in str(refused.value)


def test_kubernetes_service_links_are_no_settings() -> None:
    names = ["GATEWAY_SERVICE_HOST", "GATEWAY_SERVICE_PORT_HTTP", "GATEWAY_PORT", "GATEWAY_PORT_8000_TCP_ADDR"]
    assert load(**{f"WARMROUTE_{name}": "tcp://10.0.0.1:8000" for name in names}) == Example()


def test_help_gives_units_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        load("--help")
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for word in ("--deadline-s SECONDS", "deadline in seconds", "default: 30", "--admin", "8000", "comma-separated"):
        assert word in text


@group("Where", common=("port",))
class Where(Settings):
    """A group."""

    port: int = Field(0, description="port; more words; 0: any free one")
    path: Annotated[str, HasEffect(lambda given: given.port != 0, "it needs --port")] = Field("/", description="path")


@group("How")
class How(Settings):
    """Another group."""

    retries: int = Field(2, description="further tries " + "and many more words " * 20)


class Grouped(How, Where):
    """A program.

    More about it.
    """

    removed: ClassVar[Mapping[str, str]] = {"old": "give --port"}


def helped(flag: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stopped:
        Grouped.load([flag], prog="example", environ={})
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_help_shows_the_common_settings_in_short_and_help_all_everything(capsys: pytest.CaptureFixture[str]) -> None:
    text = helped("--help", capsys)
    assert "Where:\n  --port PORT  port; 0: any free one (default: 0)\n" in text
    assert "--path" not in text
    assert "example --help-all lists 2 more." in text
    text = helped("--help-all", capsys)
    assert text.index("Where:") < text.index("--path PATH") < text.index("How:") < text.index("--retries N")
    assert "port; more words; 0: any free one" in text
    assert "More about it." in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert helped("--version", capsys) == f"example {version('warmroute')}\n"


def test_a_setting_without_effect_is_named_once() -> None:
    assert list(Grouped.load(["--path", "/x"], prog="e", environ={}).without_effect()) == [
        "--path has no effect: it needs --port"
    ]
    assert list(Grouped.load(["--path", "/x", "--port", "1"], prog="e", environ={}).without_effect()) == []
    assert list(Grouped.load([], prog="e", environ={}).without_effect()) == []


@pytest.mark.parametrize(
    ("argv", "environ"), [(["--old", "1"], {}), (["--no-old"], {}), ([], {"WARMROUTE_OLD": "1"}), (["--old=1"], {})]
)
def test_a_removed_setting_says_what_does_its_work(argv: list[str], environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"old was removed in 0\.2\.0: give --port|OLD was removed in 0\.2\.0: give"):
        Grouped.load(argv, prog="e", environ=environ)


def test_a_group_names_only_settings_that_it_has() -> None:
    with pytest.raises(TypeError, match="Where has no settings nothing"):
        group("X", common=("nothing",))(Where)
