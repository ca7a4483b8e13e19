"""What the tenants' file says, and how errors in it are named."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from engine.common.files import UnusableFile
from router.startup.make_key import keys_command
from router.tenants.isolation import Isolation, parse_secret
from router.tenants.tenant import Tenant, TenantKey, TenantLimits
from router.tenants.tenant_file import TenantFileError, parse_tenants

DIGEST = "ab" * 32
FULL = f"""
tenants:
  - name: search
    keys:
      - sha256: {DIGEST}
        expires: 2027-01-31T00:00:00Z
      - sha256: "{"12" * 32}"
    models: [llama-*, qwen]
    requests_per_minute: 600
    tokens_per_minute: 1000000
    requests_at_once: 64
    weight: 2
    highest_priority: 5
    isolation: tenant
    cache_headers: false
  - name: batch
"""


def parse(text: str | bytes, *, has_secret: bool = True) -> tuple[Tenant, ...]:
    content = text if isinstance(text, bytes) else text.encode()
    return parse_tenants(Path("tenants.yaml"), content, has_secret=has_secret)


def test_every_field_is_read() -> None:
    search, batch = parse(FULL)
    assert search == Tenant(
        "search",
        weight=2.0,
        highest_priority=5,
        models=("llama-*", "qwen"),
        limits=TenantLimits(600, 1_000_000, 64),
        is_isolated=True,
        tells_cache=False,
        keys=(
            TenantKey(b"\xab" * 32, datetime(2027, 1, 31, tzinfo=UTC).timestamp()),
            TenantKey(b"\x12" * 32),
        ),
    )
    assert batch == Tenant("batch")
    assert parse(FULL) == (search, batch), "what has not changed is equal"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("weight: 2", "weight: 0", r"line 12: tenants\[0\].weight: .*greater than or equal to 0.001"),
        ("weight: 2", "weight: 1.0e-308", r"line 12: tenants\[0\].weight: .*greater than or equal to 0.001"),
        ("weight: 2", "weight: 1001", r"line 12: tenants\[0\].weight: .*less than or equal to 1000"),
        ("weight: 2", "wait: 2", r"line 12: tenants\[0\].wait: is not known here"),
        ("600", "'600'", r"line 9: tenants\[0\].requests_per_minute: .*valid integer"),
        ("600", "-1", r"line 9: tenants\[0\].requests_per_minute"),
        (DIGEST, "my-own-key", r"line 5: tenants\[0\].keys\[0\].sha256: must be the SHA-256"),
        ("12" * 32, DIGEST, r"line 7: tenants\[0\].keys\[1\].sha256: is a key of search already"),
        ("2027-01-31T00:00:00Z", "2027-01-31", r"line 6: tenants\[0\].keys\[0\].expires: must be a time with its zone"),
        ("2027-01-31T00:00:00Z", "2027", "must be a time with its zone"),
        ("2027-01-31T00:00:00Z", "'0001-01-01T00:00:00+23:00'", "must be a time with its zone"),
        ("2027-01-31T00:00:00Z", "'9999-12-31T23:00:00-23:00'", "must be a time with its zone"),
        ("2027-01-31T00:00:00Z", "2027-13-31T00:00:00Z", "cannot be read|must be a time"),
        ("name: batch", "name: search", r"line 16: tenants\[1\].name: search occurs twice"),
        ("name: batch", "name: a b", r"line 16: tenants\[1\].name: must be 1 to 63 of"),
        ("  - name: batch", "  - weight: 1", r"line 16: tenants\[1\].name: is missing"),
        ("isolation: tenant", "isolation: both", r"line 14: tenants\[0\].isolation: .*'none' or 'tenant'"),
        ("[llama-*, qwen]", "[]", r"line 8: tenants\[0\].models"),
        ("weight: 2", "weight: 2\n    weight: 3", r"line 13: tenants\[0\].weight: occurs twice"),
        ("tenants:", "tenant:", "line 2: tenant: is not known here"),
        ("[llama-*, qwen]", "[llama-*", "line 9"),
        ("weight: 2", "weight: !!bool x", "a value cannot be read"),
        ("weight: 2", "weight: !!timestamp x", "a value cannot be read"),
        ("weight: 2", f"weight: {'[' * 20}{']' * 20}", "line 12: lists or maps are nested too deeply"),
    ],
)
def test_what_is_wrong_is_named_by_line_and_field(old: str, new: str, said: str) -> None:
    assert old in FULL
    with pytest.raises(TenantFileError, match=said) as refused:
        parse(FULL.replace(old, new))
    assert "tenants.yaml" in str(refused.value)
    assert "my-own-key" not in str(refused.value)


def test_isolation_needs_a_secret() -> None:
    with pytest.raises(TenantFileError, match=r"line 14: tenants\[0\].isolation: needs the gateway's --tenant-secret"):
        parse(FULL, has_secret=False)


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_are_read_or_raise_a_tenant_file_error(content: bytes) -> None:
    for text in (content, FULL.encode().replace(b"600", content), b"tenants: " + content):
        with contextlib.suppress(TenantFileError):
            assert all(isinstance(tenant, Tenant) for tenant in parse(text))


@pytest.mark.parametrize("content", ["&a [*a]", "tenants: &a\n  - *a", "{a: &a {b: *a}}", "? [1]\n: 2", "? {}\n: 2"])
def test_what_holds_itself_is_refused(content: str) -> None:
    with pytest.raises(TenantFileError):
        parse(content)


def test_a_made_key_is_what_the_file_wants(capsys: pytest.CaptureFixture[str]) -> None:
    made = set()
    for _ in range(2):
        assert keys_command(["make", "search", "--expires", "2027-01-31T00:00:00Z"]) == 0
        text = capsys.readouterr().out
        key = text.splitlines()[1].removeprefix("# ")
        (tenant,) = parse(text)
        assert tenant.name == "search"
        assert tenant.keys[0].digest == sha256(key.encode()).digest()
        assert tenant.keys[0].expires_s == datetime(2027, 1, 31, tzinfo=UTC).timestamp()
        assert yaml.safe_load(text)
        made.add(key)
    assert len(made) == 2


@pytest.mark.parametrize(
    "arguments", [[], ["make"], ["make", "a b"], ["make", "a", "--expires", "soon"], ["drop", "a"]]
)
def test_what_makes_no_key(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        keys_command(arguments)
    assert ended.value.code == 2
    assert "usage: warmroute-gateway keys" in capsys.readouterr().err


def isolated(name: str) -> Tenant:
    return Tenant(name, is_isolated=True)


@given(st.text(min_size=1, max_size=5), st.text(max_size=5))
def test_no_two_tenants_have_one_salt(other: str, own: str) -> None:
    isolation = Isolation()
    isolation.use(b"s" * 32)
    salt = isolation.salt(isolated("a"), own)
    assert len(salt) == 64
    assert salt == isolation.salt(isolated("a"), own)
    assert salt != isolation.salt(isolated("a" + other), own)
    assert salt != isolation.salt(isolated("a"), own + other)
    assert salt != isolation.salt(Tenant("a"), own)
    isolation.use(b"t" * 32)
    assert salt != isolation.salt(isolated("a"), own)


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(UnusableFile, match="at least 32 bytes") as refused:
        parse_secret(Path("secret"), b"not-so-secret\n")
    assert "not-so" not in str(refused.value)
    assert parse_secret(Path("secret"), b"x" * 32 + b"\n") == b"x" * 32


def test_models_are_globs_of_whole_names() -> None:
    tenant = Tenant("t", models=("llama-*", "qwen"))
    assert [
        name for name in ("llama-8b", "llama-8b:lora", "qwen", "qwen2", "xllama-8b", "llama") if tenant.may_use(name)
    ] == [
        "llama-8b",
        "llama-8b:lora",
        "qwen",
    ]
