"""Turns jsonargparse's explanations into one sentence: what was given, what is valid, what was probably meant.

jsonargparse reports a mistake together with every type it tried, over many lines. `explain` recognises the mistakes
people make (a misspelt option, value, class path or file) and says each in one sentence; any other message is folded
to one line, so nothing is ever hidden.
"""

from __future__ import annotations

__all__ = ["closest", "did_you_mean", "explain"]

import difflib
import importlib
import re
from collections.abc import Callable, Iterable, Sequence

_LONGEST_LIST = 24  # of a longer list only the names that resemble what was typed are shown


def closest(word: str, choices: Iterable[str], count: int = 1) -> list[str]:
    """Returns the `count` names in `choices` most like `word`, best first; none if nothing resembles it."""
    lowered = {choice.lower(): choice for choice in choices}
    return [lowered[match] for match in difflib.get_close_matches(word.lower(), lowered, n=count, cutoff=0.6)]


def did_you_mean(word: str, choices: Sequence[str]) -> str:
    """Returns ``"; did you mean 'A'? Valid: A, B, C."`` for a misspelt `word`; of many choices only the likely ones."""
    listed = len(choices) <= _LONGEST_LIST
    best = closest(word, choices, count=1 if listed else 3)
    hint = f"; did you mean {' or '.join(repr(name) for name in best)}?" if best else "."
    return f"{hint} Valid: {', '.join(choices)}." if listed else hint


def explain(message: str, option_names: Sequence[str]) -> str:
    """Condenses a parser message into one sentence.

    Args:
        message: What jsonargparse says, often over many lines.
        option_names: Dotted names of every option the parser accepts, for suggestions.

    Returns:
        One sentence with the fact, the value and the remedy.
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", message)
    for rule in _RULES:
        sentence = rule(text, option_names)
        if sentence is not None:
            return sentence
    return " ".join(text.split())


def _key(text: str) -> str:
    """The innermost option a message is about (jsonargparse nests them from the outside in)."""
    keys = re.findall(r'Parser key "([^"]+)"', text)
    return keys[-1] if keys else "the value"


def _already_short(text: str, names: Sequence[str]) -> str | None:
    """Messages a nested parser of ours has condensed before they reached the outer one."""
    found = re.search(r"option '[^']+' does not exist.*", text)
    return found.group(0) if found else None


def _unknown_option(text: str, names: Sequence[str]) -> str | None:
    found = re.search(r"Option '(\S+)' is not accepted|does not accept option '(\S+)'", text)
    if found is None:
        found = re.search(r"unrecognized arguments: (?:--)?([^\s=]+)", text)
    if found is None:
        return None
    name = next(group for group in found.groups() if group)
    return f"option {name!r} does not exist{did_you_mean(name, names)}"


def _missing_option(text: str, names: Sequence[str]) -> str | None:
    found = re.search(r"the following arguments are required: (.+)", text)
    if found is None:
        return None
    keys = [key.split(".", 1)[-1] for key in found.group(1).split(", ")]
    listed = " and ".join(f"--{key}" for key in keys)
    return f"{listed} is missing; give it on the command line or in the YAML file passed with --config."


def _wrong_choice(text: str, names: Sequence[str]) -> str | None:
    literals = re.findall(r"Literal\[([^\]]+)\]", text)
    value = _value(text)
    if not literals or value is None:
        return None
    choices = dict.fromkeys(choice.strip().strip("'\"") for literal in literals for choice in literal.split(","))
    return f"{_key(text)}={value!r} is not a valid value{did_you_mean(value, list(choices))}"


def _class_not_found(text: str, names: Sequence[str]) -> str | None:
    found = re.search(r"Problem with given class_path '([^']+)':\s*(.+)", text)
    if found is None:
        return None
    path, reason = found.group(1), found.group(2).strip()
    missing = re.search(r"module '([^']+)' has no attribute '([^']+)'", reason)
    if missing:
        return (
            f"{_key(text)}: module {missing[1]} has no class {missing[2]!r}{_similar_classes(missing[1], missing[2])}"
        )
    missing = re.search(r"No module named '([^']+)'", reason)
    if missing:
        return (
            f"{_key(text)}: cannot import {path!r} because there is no module {missing[1]!r}; check the spelling, "
            "install it, or start from the folder that holds it."
        )
    return None


def _similar_classes(module: str, name: str) -> str:
    """Names like `name` in a module that was imported a moment ago."""
    members = vars(importlib.import_module(module))
    best = closest(name, [member for member, value in members.items() if isinstance(value, type)], count=3)
    return f"; did you mean {' or '.join(repr(match) for match in best)}?" if best else "; check its name."


def _no_class_path(text: str, names: Sequence[str]) -> str | None:
    found = re.search(r"Expected a dot import path string: (\S+)", text)
    if found is None:
        return None
    if "NestedArg" in text:
        return f"{_key(text)}={found[1]!r} is a short name and takes no options; give the class path with them."
    return f"{_key(text)}: no class is named {found[1]!r}; give its full path, package.module.ClassName."


def _wrong_base(text: str, names: Sequence[str]) -> str | None:
    found = re.search(r"Import path (\S+) does not correspond to a subclass of (\w+)", text)
    if found is None:
        return None
    return f"{_key(text)}: {found[1]} is not a {found[2]}; give the path of a class derived from {found[2]}."


def _wrong_type(text: str, names: Sequence[str]) -> str | None:
    types = list(dict.fromkeys(re.findall(r"Expected an? <class '([\w.]+)'>", text)))
    value = _value(text)
    if not types or value is None:
        return None
    wanted = " or ".join("null" if name == "NoneType" else name.rsplit(".", 1)[-1] for name in types)
    return f"{_key(text)}={value!r} is of the wrong type; give {wanted}."


def _bad_file(text: str, names: Sequence[str]) -> str | None:
    found = re.search(r"File (?:does not exist|is not readable): '?([^'\n]+)", text)
    if found:
        return f"there is no readable file {found[1]!r}; check the path given to --config."
    if "Problems parsing config" in text:
        reason = text.split(":", 1)[1].replace('in "<unicode string>", ', "at ")
        return f"the YAML file cannot be read: {' '.join(reason.split())}."
    if "Unexpected config" in text:
        return "the YAML file holds no mapping of options; write lines such as 'trainer:' and 'model:'."
    return None


def _value(text: str) -> str | None:
    """The value a message is about; the innermost check says "Got", the union around it says "Given" of the whole."""
    found = re.search(r"Got value: (.+)", text) or re.search(r"Given value: (.+)", text)
    return found[1].strip() if found else None


# The first rule that recognises a message answers. Order matters: a misspelt option inside a class, for instance, also
# carries the failed alternatives of the class's union type.
_RULES: tuple[Callable[[str, Sequence[str]], str | None], ...] = (
    _already_short,
    _bad_file,
    _unknown_option,
    _missing_option,
    _class_not_found,
    _wrong_base,
    _wrong_choice,
    _no_class_path,
    _wrong_type,
)
