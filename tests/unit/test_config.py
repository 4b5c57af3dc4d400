"""``torchport.core.config``: every setting is validated, from wherever it comes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchport.core.config import Config
from torchport.core.errors import ConfigError, TorchportError

COUNTS = {"max_trace_ops": 64, "max_trace_nodes": 1, "max_computations": 1}
FLAGS = ("verify_graphs", "flush_on_copy")


def test_defaults() -> None:
    config = Config({})
    assert (config.backend, config.fallback) == ("", "allow")
    assert config.max_trace_ops >= 64
    assert config.flush_on_copy is True


def test_environment_is_read_and_parsed() -> None:
    config = Config({"TORCHPORT_BACKEND": "xla", "TORCHPORT_MAX_TRACE_OPS": "128", "TORCHPORT_VERIFY_GRAPHS": "Yes"})
    assert (config.backend, config.max_trace_ops, config.verify_graphs) == ("xla", 128, True)


def test_environment_of_others_is_left_alone() -> None:
    assert Config({"MAX_TRACE_OPS": "nonsense", "PATH": "x"}).max_trace_ops == Config({}).max_trace_ops


@pytest.mark.parametrize(
    ("variable", "value", "accepted"),
    [
        ("TORCHPORT_FALLBACK", "maybe", "allow, warn, error"),
        ("TORCHPORT_MAX_TRACE_OPS", "63", "at least 64"),
        ("TORCHPORT_MAX_TRACE_OPS", "many", "whole number"),
        ("TORCHPORT_COMPILE_NICE", "20", "from 0 to 19"),
        ("TORCHPORT_COMPILE_TIMEOUT", "0", "at least 1"),
        ("TORCHPORT_VERIFY_GRAPHS", "2", "true/false"),
    ],
)
def test_a_malformed_environment_names_variable_value_and_choices(variable: str, value: str, accepted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config({variable: value})
    for part in (variable, repr(value), accepted):
        assert part in str(caught.value)


def test_an_unknown_setting_lists_the_known_ones() -> None:
    config = Config({})
    with pytest.raises(ConfigError, match=r"no setting 'falback'; it has: .*fallback"):
        config.falback = "warn"  # type: ignore[attr-defined]
    assert not hasattr(config, "falback")


@pytest.mark.parametrize("value", [3.5, float("inf"), float("nan"), None, True, "", "1e3", [64], b"64"])
def test_a_count_is_a_whole_number(value: object) -> None:
    config = Config({})
    before = config.max_trace_ops
    with pytest.raises(ConfigError, match="whole number of at least 64"):
        config.max_trace_ops = value  # type: ignore[assignment]
    assert config.max_trace_ops == before


@given(st.sampled_from(sorted(COUNTS)), st.integers())
def test_counts_have_a_minimum(name: str, value: int) -> None:
    config = Config({})
    before = getattr(config, name)
    if value >= COUNTS[name]:
        setattr(config, name, str(value))
        assert getattr(config, name) == value
    else:
        with pytest.raises(ConfigError):
            setattr(config, name, value)
        assert getattr(config, name) == before


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize(
    ("raw", "value"), [("1", True), ("ON", True), ("true", True), ("0", False), ("No", False), (True, True)]
)
def test_flags(name: str, raw: object, value: bool) -> None:
    config = Config({})
    setattr(config, name, raw)
    assert getattr(config, name) is value


@given(st.one_of(st.text(), st.integers(), st.floats(), st.none(), st.binary(), st.lists(st.integers(), max_size=2)))
def test_assigning_anything_is_accepted_or_a_config_error(value: object) -> None:
    for name in ("backend", "fallback", *COUNTS, *FLAGS):
        config = Config({})
        before = repr(config)
        try:
            setattr(config, name, value)
        except ConfigError:
            assert repr(config) == before


def test_override_restores_also_after_an_exception() -> None:
    config = Config({})
    with pytest.raises(KeyError), config.override(fallback="error", verify_graphs=True) as inside:
        assert inside is config
        assert (config.fallback, config.verify_graphs) == ("error", True)
        raise KeyError
    assert repr(config) == repr(Config({}))


def test_override_with_one_bad_value_changes_nothing() -> None:
    config = Config({})
    with pytest.raises(ConfigError), config.override(verify_graphs=True, fallback="maybe"):
        pytest.fail("the block must not run")
    assert repr(config) == repr(Config({}))


def test_repr_shows_every_setting() -> None:
    shown = repr(Config({}))
    for name in ("backend", "fallback", *COUNTS, *FLAGS):
        assert f"{name}=" in shown


def test_config_errors_are_caught_as_torchport_and_runtime_errors() -> None:
    assert issubclass(ConfigError, TorchportError)
    assert issubclass(ConfigError, RuntimeError)
