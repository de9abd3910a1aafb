"""The pages of documentation, taken apart: fenced blocks with the comments before them, commands, links, variables."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# CHANGELOG.md tells of the past, so its commands and variables need not exist any more.
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples/README.md", *(ROOT / "docs").rglob("*.md")]
)

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w+-]*) *$")
_COMMENT = re.compile(r"^<!-- (?P<word>not run|run by): (?P<rest>.+?) -->$")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(?P<text>.+?) *$", re.MULTILINE)
_SPAN = re.compile(r"`(coatcheck(?: [^`\n]*)?)`")
_VARIABLE = re.compile(r"\bCOATCHECK_[A-Z][A-Z_]*[A-Z]\b")
_SHELLS = {"bash", "sh", "shell", "console"}


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. `line` is that of its first line of text; the directive is the comment right before the fence."""

    page: Path
    line: int
    language: str
    text: str
    directive: str = ""
    argument: str = ""

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True, slots=True)
class Command:
    """A command line of ours. One in running text is a mention: it may leave arguments out."""

    place: str
    words: tuple[str, ...]
    is_mention: bool


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks_of(page: Path) -> Iterator[Block]:
    lines = page.read_text().splitlines()
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        number += 1
        if fence is None:
            continue
        comment = _COMMENT.match(lines[number - 2].strip()) if number >= 2 else None
        begin = number
        while lines[number].strip() != "```":
            number += 1
        text = "\n".join(line.removeprefix(fence["indent"]) for line in lines[begin:number]) + "\n"
        yield Block(
            page,
            begin + 1,
            fence["language"],
            text,
            *((comment["word"], comment["rest"]) if comment else ("", "")),
        )
        number += 1


def every_block() -> list[Block]:
    return [block for page in PAGES for block in blocks_of(page)]


def blocks(*languages: str) -> list[Block]:
    return [block for block in every_block() if block.language in languages]


def block_run_by(test: str, language: str) -> Block:
    """The one block of a language that says this test runs it."""
    (found,) = [it for it in blocks(language) if (it.directive, it.argument) == ("run by", test)]
    return found


def commands() -> Iterator[Command]:
    """Every command line of ours: in shell blocks, in indented code, and between backticks in running text."""
    for page in PAGES:
        for block in blocks_of(page):
            if block.language in _SHELLS:
                for offset, line in enumerate(block.text.splitlines()):
                    yield from _commands_in(line, f"{name_of(page)}:{block.line + offset}")
        for number, line in enumerate(_outside_blocks(page).splitlines(), start=1):
            place = f"{name_of(page)}:{number}"
            if line.startswith("    "):
                yield from _commands_in(line, place)
            else:
                yield from (Command(place, tuple(shlex.split(span)[1:]), True) for span in _SPAN.findall(line))


def _commands_in(line: str, place: str) -> Iterator[Command]:
    if not line.strip().removeprefix("$ ").startswith("coatcheck "):
        return  # somebody else's, perhaps over several lines
    words = shlex.split(line.strip().removeprefix("$ "), comments=True)
    while words and (words[-1] == "&" or words[-1].startswith((">", "2>"))):
        words.pop()
    if words and words[0] == "coatcheck":
        yield Command(place, tuple(words[1:]), False)


def links_of(page: Path) -> list[str]:
    return [found["target"] for found in _LINK.finditer(_outside_blocks(page))]


def anchors_of(page: Path) -> set[str]:
    """The anchors GitHub makes of a page's headings."""
    texts = (found["text"] for found in _HEADING.finditer(_outside_blocks(page)))
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts}


def variables_of(page: Path) -> set[str]:
    return set(_VARIABLE.findall(page.read_text()))


def _outside_blocks(page: Path) -> str:
    """The page with the lines of its fenced blocks emptied, so that line numbers stay."""
    kept, is_inside = [], False
    for line in page.read_text().splitlines():
        is_fence = _FENCE.match(line) is not None or (is_inside and line.strip() == "```")
        kept.append("" if is_inside or is_fence else line)
        is_inside ^= is_fence
    return "\n".join(kept)
