"""Suggestions and the folding of messages that no rule knows; the rules themselves are tested on real mistakes."""

from __future__ import annotations

from lightning_llmscale.cli.messages import closest, did_you_mean, explain


def test_names_are_compared_without_regard_to_case() -> None:
    assert closest("ringallreducestrategy", ["DDPStrategy", "RingAllReduceStrategy"]) == ["RingAllReduceStrategy"]
    assert closest("x", ["DDPStrategy"]) == []


def test_few_names_are_all_listed_and_of_many_only_the_likely() -> None:
    assert did_you_mean("dorp", ["drop", "error"]) == "; did you mean 'drop'? Valid: drop, error."
    assert did_you_mean("zzz", ["drop", "error"]) == ". Valid: drop, error."
    many = [f"option_{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    assert did_you_mean("option_k", many).startswith("; did you mean 'option_k' or ")
    assert "Valid" not in did_you_mean("option", many)
    assert did_you_mean("zzz", many) == "."


def test_an_unknown_message_is_folded_and_loses_nothing() -> None:
    assert explain("first line\n   second:\tline ", []) == "first line second: line"
