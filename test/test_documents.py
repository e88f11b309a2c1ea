"""The pages: their Python blocks run, and their commands exist."""

import importlib.util
import re
import shlex

import pytest
import torch

from documents import ROOT, blocks, run

PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
    if path.name != "api.md"  # signatures
)
WITH_PYTHON = {page for page in PAGES if blocks(page, "python")}
ON_RANKS = {"docs/distributed.md"}  # test/distributed/test_page.py
NOT_RUN = {
    "a script for torchrun; test/distributed/test_page.py starts it on two ranks",
    "changes verl; test/compat/test_verl.py does, and undoes it",
    "needs DeepSpeed",
    "needs the package transformers; test/compat/test_docs.py runs it",
    "needs the package trl; test/compat/test_docs.py runs it",
}
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M)


def migrating():
    """What docs/migrating.md takes as given; 24 tokens, no size has a meaning."""
    B, T, H, V = 4, 6, 16, 50
    hidden, weight = torch.randn(B, T, H), torch.randn(V, H)
    ids, logps = torch.randint(V, (B, T)), -torch.rand(B, T)
    return {
        "hidden": hidden,
        "weight": weight,
        "lm_head_weight": weight,
        "bias": torch.randn(V),
        "labels": ids,
        "ids": ids,
        "action_ids": ids,
        "target_ids": ids,
        "mask": torch.ones(B, T),
        "attention_mask": torch.ones(B, T),
        "advantages": torch.randn(B),
        "old_logps": logps,
        "ref_logps": logps,
        "temperature": 0.7,
        "tp_group": None,
        "rows": hidden.flatten(0, 1),
        "target": ids.flatten(),
        "token_ids": torch.randint(V, (3,)),
        "policy_logits": torch.randn(B, T, V),
        "ref_logits": torch.randn(B, T, V),
    }


GIVEN = {"docs/migrating.md": migrating}


@pytest.mark.parametrize("page", sorted(WITH_PYTHON - ON_RANKS))
def test_python_blocks_run_in_their_order(page):
    scope = GIVEN.get(page, dict)()
    ran = [run(block, scope) for block in blocks(page, "python") if block.reason is None]
    assert ran


def test_what_does_not_run_says_why():
    found = {block.reason for page in PAGES for block in blocks(page, "python")}
    assert found - {None} == NOT_RUN
    for file in re.findall(r"test/\S+\.py", " ".join(NOT_RUN)):
        assert (ROOT / file).exists(), file


def commands(page):
    """Lines of the page's shell blocks, and the commands within its sentences."""
    text = (ROOT / page).read_text("utf-8")
    lines = [line for block in blocks(page, "sh") for line in block.code.splitlines()]
    quoted = re.findall(r"`((?:[A-Z]+=\w+ )?(?:make|pip|python|python3) [^`\n]+)`", text)
    return [line for line in (*lines, *quoted) if line.strip()]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_commands_exist(page):
    for line in commands(page):
        words = shlex.split(line, comments=True)
        words = [word for word in words if not re.match(r"[A-Z]+=\w+$", word)]
        program, *rest = words
        check = {"make": check_make, "python": check_python, "pip": check_pip}[program]
        check(rest)


def check_make(words):
    options = [word.removeprefix("ARGS=") for word in words if word.startswith("ARGS=")]
    targets = [word for word in words if "=" not in word]
    assert targets
    assert set(targets) <= set(TARGETS)
    if targets == ["benchmark"]:
        pytest.importorskip("rich")
        parser = importlib.import_module("benchmark.__main__").parser()
        for option in options:
            parser.parse_args(shlex.split(option))


def check_python(words):
    assert words[0] == "-m"
    assert importlib.util.find_spec(words[1]), words[1]


def check_pip(words):
    assert words[0] == "install"
    if "-c" in words:
        constrained = (ROOT / "constraints.txt").read_text("utf-8")
        names = [re.split(r"[\[=<>]", word)[0] for word in words[words.index("-c") + 2 :]]
        for name in (name for name in names if not name.startswith("-")):
            assert re.search(rf"^{re.escape(name)}==", constrained, re.M), name


def test_a_block_and_its_reason_are_read(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(
        "## One\n```python\na = 1\n```\n"
        "## Two\n<!-- not run here: needs b -->\n```python\nb\n```\n```sh\nmake\n```\n"
        "### Below two\n```python\nc = a\nd\n```\n## Three\n"
    )
    monkeypatch.setattr("documents.ROOT", tmp_path)
    first, second, third = blocks("page.md", "python")
    assert (first.code, first.line, first.reason) == ("a = 1\n", 3, None)
    assert (second.code, second.line, second.reason) == ("b\n", 8, "needs b")
    assert blocks("page.md", "python", "## Two") == [second, third]
    scope = {}
    run(first, scope)
    with pytest.raises(NameError, match="'d'") as error:
        run(third, scope)
    assert scope["c"] == 1
    assert error.traceback[-1].lineno + 1 == third.line + 1
