from pathlib import Path

import pytest

from recipes import Recipe
from recipes.load import RecipeError, load


def problems(tmp_path: Path, text: str | bytes, *sets: str) -> list[str]:
    """What is wrong with a file of this text, each sentence without the folder."""
    file = tmp_path / "x.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RecipeError) as caught:
        load(file, sets)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return [problem.replace(f"{tmp_path}/", "") for problem in caught.value.problems]


def loaded(tmp_path: Path, text: str, *sets: str) -> Recipe:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    return load(file, sets)


def test_a_name_alone_is_a_whole_recipe(tmp_path: Path) -> None:
    assert loaded(tmp_path, "name: my-model") == Recipe(name="my-model")


@pytest.mark.parametrize(
    ("text", "line", "sentence"),
    [
        ("name: ok\ntrain:\n  stepz: 5", 3, "train.stepz is not a field of train; did you mean 'steps'?"),
        (
            "name: ok\n\ncluster: {kind: slurn}",
            3, "cluster.kind is 'slurn'; allowed: local, slurm, batch, eks, sagemaker; did you mean 'slurm'?",
        ),
        ("train: {steps: many}", 1, "train.steps is 'many', which is not a whole number"),
        ("train: {steps: 1.5}", 1, "train.steps is 1.5, which is not a whole number"),
        ("train: {steps: true}", 1, "train.steps is 'true', which is not a whole number"),
        ("train: {steps: 1:30}", 1, "train.steps is '1:30', which is not a whole number"),
        ("train: {learning_rate: fast}", 1, "train.learning_rate is 'fast', which is not a number"),
        ("train: {steps: 0}", 1, "train.steps is 0, it must be at least 1"),
        ("model: {vocab_size: 0}", 1, "model.vocab_size is 0, it must be at least 300"),
        ("data: {held_out: 0.5}", 1, "data.held_out is 0.5, it must be above 0 and below 0.5"),
        ("budget: {max_usd: -1}", 1, "budget.max_usd is -1, it must be above 0"),
        ("budget: {max_usd: 1e999}", 1, "budget.max_usd is inf, it must be above 0"),
        ("keep: perhaps", 1, "keep is 'perhaps', which is neither true nor false"),
        ("description: 5", 1, "description is 5, which is not text; put it in quotes"),
        ("train:\n  steps:", 2, "train.steps is empty; it takes a whole number, at least 1"),
        ("train: 5", 1, "train is 5, but it is a section: write its fields (steps, global_batch_size, "
         "learning_rate, …) below it, indented"),
        ("cluster: here", 1, "cluster is 'here', but it is a section: write its fields (kind, nodes, "
         "processes_per_node, …) below it, indented"),
        ("cluster: {nodes: 4}", 1, "cluster.kind is missing; allowed: local, slurm, batch, eks, sagemaker"),
        (
            "cluster: {kind: eks, processes_per_node: 2}",
            1, "cluster.processes_per_node is not a field of a cluster of kind eks; "
            "clusters of kind local have it",
        ),
        ("cluster: {kind: eks, nodes: 0}", 1, "cluster.nodes is 0, it must be at least 1"),
        ("cluster: {kind: local, nodes: 17}", 1, "cluster.nodes is 17, it must be at least 1 and at most 16"),
        ("cluster: {kind: eks, region: us}", 1, "cluster.region is 'us', which does not fit; it takes its "
         "code, such as us-east-1"),
        ("name: My Model", 1, "name is 'My Model', which does not fit; it takes lower-case letters, digits "
         "and dashes, 2 to 40 characters"),
        ("score: {must_beat: gzip}", 1, "score.must_beat is 'gzip', which is not a list; write it as [one, two]"),
        ("score:\n  must_beat:\n  - gzip\n  - unigramm", 4, "score.must_beat[1] is 'unigramm'; allowed: gzip, "
         "unigram; did you mean 'unigram'?"),
        ("serve: {prompts: []}", 1, "serve.prompts is empty, it needs at least one entry"),
        ("parallel: {micro_batch_size: atuo}", 1, "parallel.micro_batch_size is 'atuo', which does not fit; "
         "it takes a whole number, at least 1, or auto; did you mean 'auto'?"),
        ("parallel: {micro_batch_size: 0}", 1, "parallel.micro_batch_size is 0, which does not fit; "
         "it takes a whole number, at least 1, or auto"),
        ("name: ok\nsteps: 5", 2, "steps is not a field of the recipe itself; did you mean 'train.steps'?"),
        ("trian: {}", 1, "trian is not a field of the recipe itself; did you mean 'train'?"),
        ("image: {zzz: 1}", 1, "image.zzz is not a field of image; its fields are flavour, ami, container"),
        ("data: {min_chars: 010}", 1, "data.min_chars is 010, which some programs read as an octal number; "
         "write 10 or, if it is text, '010'"),
        ("name: ok\nmodel:\n  heads: 7", 2, "in model, heads (7) must divide hidden_size (192)"),
        ("train:\n  steps: 5\n  steps: 6", 3, "train.steps was given already in line 2; keep one of the two"),
    ],
)  # fmt: skip
def test_one_sentence_says_what_is_wrong_and_where(tmp_path: Path, text: str, line: int, sentence: str) -> None:
    told = problems(tmp_path, text)
    assert f"x.yaml line {line}: {sentence}" in told
    assert len(told) <= 2  # heads: 7 has two things wrong


def test_all_mistakes_are_told_at_once_in_the_order_of_the_lines(tmp_path: Path) -> None:
    text = "train:\n  steps: many\n  warmupsteps: 1\nmodel:\n  heads: 7\n  kv_heads: 5\ndata: {include: []}\n"
    told = problems(tmp_path, text, "score.max_tokens=0", "train.grad_clip=-1")
    assert [one.partition(": ")[0] for one in told] == [
        "x.yaml line 2",
        "x.yaml line 3",
        "x.yaml line 4",
        "x.yaml line 4",
        "x.yaml line 7",
        "--set score.max_tokens=0",
        "--set train.grad_clip=-1",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train:\n\tsteps: 1", ["x.yaml line 2, column 1: not valid YAML", "indent with spaces"]),
        ("name: a: b", ["x.yaml line 1, column 8: not valid YAML", "put text in quotes"]),
        ("name: 'open", ["x.yaml line 1", "is not closed"]),
        ("data: {include: [a, b}", ["x.yaml line 1", "a bracket is not closed"]),
        ("train:\n  steps: 1\n warmup_steps: 0", ["x.yaml line 3", "indentation"]),
        ("name: *there", ["x.yaml line 1", "no anchor"]),
        ("name: a\n---\nname: b", ["x.yaml line 2", "second document"]),
        ("name: a\x07", ["x.yaml line 1", "cannot be part of a recipe"]),
        (b"name: ok\nx: \xff\xfe", ["x.yaml line 2: the file is not UTF-8 text"]),
        (b"\x7fELF\x02\x01\x01\x00\x00", ["x.yaml line 1"]),
        ("", ["x.yaml is empty"]),
        ("# nothing but a comment\n", ["x.yaml is empty"]),
        ("- name: a", ["x.yaml line 1: a recipe is a mapping of fields", "a list"]),
        ("hello", ["x.yaml line 1: a recipe is a mapping of fields", "'hello'"]),
        ("? [a, b]\n: c", ["x.yaml line 1: a field's name must be a word"]),
        ("name: !!python/object/apply:os.system [ls]", ["x.yaml line 1: the tag", "not allowed"]),
        ("name: !!binary aGVsbG8=", ["x.yaml line 1: the tag", "not allowed"]),
        ("train: &a\n  steps: *a", ["x.yaml line 1", "more than 20 levels"]),
        ("[" * 3000, ["x.yaml"]),
        ("x: " + "y" * 100_001, ["x.yaml is larger than 100,000 bytes"]),
    ],
)
def test_what_is_no_recipe_at_all(tmp_path: Path, text: str | bytes, says: list[str]) -> None:
    told = "\n".join(problems(tmp_path, text))
    for part in says:
        assert part in told


def test_an_alias_bomb_is_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    (told,) = problems(tmp_path, "\n".join(lines))
    assert "more than 10,000 values" in told


def test_aliases_are_fine(tmp_path: Path) -> None:
    assert loaded(tmp_path, "train: {steps: &n 64, keep_checkpoints: *n}").train.keep_checkpoints == 64


def test_plain_words_mean_what_they_look_like(tmp_path: Path) -> None:
    recipe = loaded(
        tmp_path,
        "description: 2024-01-31\nkeep: on\nmodel: {tie_embeddings: no}\nexport: {license: no}\n"
        "train: {learning_rate: 1e-4, weight_decay: '1e-2', beta1: .5, steps: 1_000, timeout_hours: 1E1}\n"
        "serve: {prompts: [yes, off, 'null']}\nbudget: {max_usd: 1e5}\nparallel: auto\n",
    )
    assert (recipe.description, recipe.keep, recipe.model.tie_embeddings) == ("2024-01-31", True, False)
    assert (recipe.export.license, recipe.serve.prompts) == ("no", ("yes", "off", "null"))
    train = recipe.train
    assert (train.learning_rate, train.weight_decay, train.beta1, train.steps) == (1e-4, 1e-2, 0.5, 1000)
    assert (train.timeout_hours, recipe.budget.max_usd) == (10.0, 100_000.0)


def test_a_section_with_everything_commented_out_has_its_defaults(tmp_path: Path) -> None:
    assert loaded(tmp_path, "name: ok\ntrain:\n  # steps: 5\ncluster:\n") == Recipe(name="ok")


def test_a_byte_order_mark_is_no_part_of_the_name(tmp_path: Path) -> None:
    assert loaded(tmp_path, "\ufeffname: ok").name == "ok"


def test_sets_lie_over_the_file(tmp_path: Path) -> None:
    sets = ["train.steps=200", "train.steps=300", "cluster.nodes=3", "parallel.strategy=ddp", "serve.prompts=[a, b]"]
    recipe = loaded(tmp_path, "parallel: auto\ntrain: {steps: 100, seed: 4}", *sets)
    assert (recipe.train.steps, recipe.train.seed, recipe.serve.prompts) == (300, 4, ("a", "b"))
    assert (recipe.cluster.nodes, recipe.parallel.strategy) == (3, "ddp")


def test_sets_can_make_good_what_the_file_has_wrong(tmp_path: Path) -> None:
    assert loaded(tmp_path, "train: {steps: many}", "train.steps=300").train.steps == 300


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("train.stepz=3", "train.stepz is not a field of train; did you mean 'steps'?"),
        ("trian.steps=3", "trian is not a field of the recipe itself; did you mean 'train'?"),
        ("train.steps=many", "train.steps is 'many', which is not a whole number"),
        ("model.heads=5", "in model, heads (5) must divide hidden_size (192)"),
        ("train.steps", "write it as field=value, such as train.steps=200"),
        ("=3", "write it as field=value, such as train.steps=200"),
        ("name.first=a", "name is 'ok', it has no fields to set"),
        (
            "train.steps=010",
            "the value is 010, which some programs read as an octal number; write 10 or, if it is text, '010'",
        ),
        ("description=a: b", "description is a mapping, which is not text; put it in quotes"),
        ("name=", "name is empty; it takes text"),
    ],
)
def test_wrong_sets_are_told_like_wrong_lines(tmp_path: Path, assignment: str, sentence: str) -> None:
    assert f"--set {assignment}: {sentence}" in problems(tmp_path, "name: ok", assignment)


def test_a_set_that_is_no_yaml(tmp_path: Path) -> None:
    (told,) = problems(tmp_path, "name: ok", "serve.prompts=[a")
    assert told.startswith("--set serve.prompts=[a line 1, column 3: not valid YAML")


def test_a_missing_file_names_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "llama3-8b-p4de.yaml").write_text("name: ok")
    for wrong in ("llama3-8b-p4d.yaml", "llama3-8b-p4de"):
        with pytest.raises(RecipeError, match=r"does not exist; did you mean 'llama3-8b-p4de.yaml'\?"):
            load(tmp_path / wrong)
    with pytest.raises(RecipeError, match="does not exist; the gallery of recipes is in "):
        load(tmp_path / "nowhere" / "zzz.yaml")
    with pytest.raises(RecipeError, match=r"is a folder, not a recipe; in it are: llama3-8b-p4de.yaml"):
        load(tmp_path)


def test_a_mapping_is_checked_in_the_same_words_and_left_alone() -> None:
    told = {"train": {"steps": 100}}
    assert load(told, ["train.steps=50"]).train.steps == 50
    assert told == {"train": {"steps": 100}}
    assert load(Recipe().model_dump()) == Recipe()
    with pytest.raises(RecipeError, match=r"^train.stepz is not a field of train; did you mean 'steps'\?$"):
        load({"train": {"stepz": 1}})
