"""Command lines of flags: what the recipe lays over them."""

from collections.abc import Iterable, Sequence

from training.cases.base import CaseError


def words(flags: Iterable[str]) -> tuple[str, ...]:
    """Flags, each with its values after spaces, as the words of a command line."""
    return tuple(word for flag in flags for word in flag.split())


def laid_over(told: Sequence[str], arguments: Iterable[str]) -> tuple[str, ...]:
    """The words with each `name=value` in place of what they say of it, or at their end.

    `name=true` gives a flag without a value, `name=false` takes a flag away. Raises `CaseError` for what has no =.
    """
    groups = _grouped(told)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        flag = f"--{name.strip().lstrip('-')}"
        if not equals or flag == "--":
            raise CaseError(f"case.arguments has {argument!r}: write it as name=value")
        if value == "false":
            groups.pop(flag, None)
        else:
            groups[flag] = [] if value == "true" else value.split()
    return tuple(word for flag, values in groups.items() for word in ([flag] if flag else []) + values)


def _grouped(told: Sequence[str]) -> dict[str, list[str]]:
    """Flags and their values, in order; what comes before the first flag is under ""."""
    groups: dict[str, list[str]] = {"": []}
    flag = ""
    for word in told:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            groups[flag] = [value] if equals else []
        else:
            groups[flag].append(word)
    return groups
