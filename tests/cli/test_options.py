"""The command line that users may rely on; a change here belongs in a release."""

from __future__ import annotations

import click
import pytest
import torch
from torch import nn

from steadytorch import Workload
from steadytorch.cli import options
from steadytorch.cli import steady as root
from steadytorch.device.facts import DeviceFacts
from steadytorch.errors import UsageError

from .conftest import only_line

DEVICE = ("--device", "text", "auto")
STORE = ("--store", "directory", None)
JSON = ("--json", "file", None)
QUIET = ("--quiet", "flag", False)

SHAPING = [
    ("--batch", "integer range", None),
    ("--input", "text*", None),
    DEVICE,
    ("--train", "flag", False),
    ("--seed", "integer", 0),
]

COMMANDS = {
    "demo": [
        ("--budget", "text", "150s"),
        DEVICE,
        STORE,
        ("--all", "flag", False),
        JSON,
        QUIET,
    ],
    "measure": [
        ("WORKLOAD", "text", None),
        *SHAPING,
        ("--processes", "integer range", 1),
        ("--budget", "text", "20s"),
        JSON,
        QUIET,
    ],
    "run": [
        ("-m", "text", None),
        JSON,
        ("--html", "file", None),
        ("--keep-slow", "integer range", None),
        ("--traces", "path", None),
        QUIET,
        ("[SCRIPT] [ARGS]...", "text", None),
    ],
    "explain": [
        ("WORKLOAD|TRACE...", "text", None),
        *SHAPING,
        ("--budget", "text", "20s"),
        ("--steps", "integer range", 5),
        ("--pause", "text", None),
        ("--all", "flag", False),
        JSON,
        QUIET,
    ],
    "compare": [
        ("A", "text", None),
        ("B", "text", None),
        *SHAPING,
        ("--processes", "integer range", None),
        ("--budget", "text", "5m"),
        ("--metric", "latency|period", "latency"),
        ("--fail-slower", "text", None),
        ("--markdown", "file", None),
        JSON,
        QUIET,
    ],
    "gate": [
        ("WORKLOAD...", "text", None),
        ("--base", "text", None),
        *SHAPING,
        ("--threshold", "text", "1%"),
        ("--processes", "integer range", 40),
        ("--budget", "text", None),
        ("--metric", "latency|period", "latency"),
        ("--base-env", "text", None),
        ("--install", "flag", False),
        ("--markdown", "file", None),
        JSON,
        QUIET,
    ],
    "track": [("FILE|FOLDER...", "path", None), ("--html", "file", None), JSON, QUIET],
    "tune": [
        ("[WORKLOAD]", "text", None),
        *SHAPING,
        ("--objective", "auto|latency|p99|throughput|contended", "auto"),
        ("--precision", "same|tf32|bf16|fp16|int8", "same"),
        ("--tolerance", "float", None),
        ("--budget", "text", "3m"),
        ("--max-memory", "text", None),
        ("--devices", "text", None),
        STORE,
        ("--mode", "replay|tune|strict", "replay"),
        ("--bundle", "flag", False),
        ("--all", "flag", False),
        ("--list", "path", None),
        ("--sweep", "directory", None),
        ("--shard", "text", "auto"),
        ("--status", "flag", False),
        ("--retry", "flag", False),
        ("--submit", "integer range", None),
        ("--partition", "text", None),
        ("--slurm", "text*", None),
        JSON,
        QUIET,
    ],
    "conv": [
        ("WORKLOAD", "text", None),
        *SHAPING,
        ("--layer", "integer range", None),
        ("--budget", "text", "60s"),
        ("--deterministic", "flag", False),
        STORE,
        JSON,
        QUIET,
    ],
    "plans": [],
    "plans export": [("FILE", "file", None), ("[ID]...", "text", None), STORE],
    "plans push": [("URL", "text", None), ("[ID]...", "text", None), STORE],
    "plans import": [("FILE", "path", None), STORE],
    "plans list": [STORE],
    "plans rm": [
        ("[ID]...", "text", None),
        ("--all", "flag", False),
        ("--yes", "flag", False),
        STORE,
    ],
    "plans show": [("ID", "text", None), STORE],
    "plans verify": [
        ("[ID]", "text", None),
        ("--all", "flag", False),
        ("--workload", "text", None),
        *SHAPING,
        ("--processes", "integer range", 5),
        STORE,
        QUIET,
    ],
    "report": [
        ("RESULT", "path", None),
        ("[OTHER]", "path", None),
        ("--output", "path", None),
        ("--embed", "flag", False),
        QUIET,
    ],
    "doctor": [DEVICE, ("--plugins", "flag", False), JSON, QUIET],
}


def _command(words):
    found, context = root, click.Context(root, info_name="steady")
    for word in words.split():
        found = found.get_command(context, word)
    return found


def _described(parameter):
    name = parameter.metavar if isinstance(parameter, click.Argument) else parameter.opts[0]
    kind = parameter.type.name
    if isinstance(parameter.type, click.Choice):
        kind = "|".join(parameter.type.choices)
    elif getattr(parameter, "is_flag", False):
        kind = "flag"
    context = click.Context(click.Command("any"))
    default = parameter.get_default(context)
    if isinstance(parameter, click.Option) and parameter.multiple:
        return name, f"{kind}*", None
    return name, kind, default if isinstance(default, (str, int)) else None


def _groups(words=""):
    command = _command(words)
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            yield (inner := f"{words} {name}".strip())
            yield from _groups(inner)


def test_the_commands_are_these():
    assert set(_groups()) == COMMANDS.keys()


@pytest.mark.parametrize("words", COMMANDS)
def test_options_types_defaults_and_choices_are_frozen(words):
    described = [_described(parameter) for parameter in _command(words).params]
    assert described == COMMANDS[words]


@pytest.mark.parametrize("words", COMMANDS)
def test_arguments_are_required_unless_shown_in_brackets(words):
    arguments = [p for p in _command(words).params if isinstance(p, click.Argument)]
    assert all(argument.required != argument.metavar.startswith("[") for argument in arguments)


@pytest.mark.parametrize(
    ("words", "option"),
    [
        *[(words, "--batch") for words in ("measure", "compare", "tune")],
        *[(words, "--processes") for words in ("measure", "compare")],
    ],
)
def test_batches_and_processes_start_at_one(words, option):
    (found,) = [p for p in _command(words).params if p.opts == [option]]
    assert (found.type.min, found.type.max) == (1, None)


def test_every_budget_is_a_time_with_an_example():
    budgets = [p for words in COMMANDS for p in _command(words).params if "--budget" in p.opts]
    assert len(budgets) == 7
    assert {each.metavar for each in budgets} == {"TIME"}
    assert all(", such as 90s or 5m." in each.help for each in budgets)


@pytest.mark.parametrize("words", COMMANDS)
def test_help_names_guides_rather_than_files_of_the_repository(steady, words):
    assert ".md" not in steady(*words.split(), "--help").out


def test_the_overview_lists_exactly_the_commands_there_are(steady):
    shown = steady("--help")
    assert shown.code == 0
    listed = shown.out.partition("Commands:")[2].splitlines()
    # A description that wraps is indented further.
    names = [line.split()[0] for line in listed if line.startswith("  ") and line[2] != " "]
    top = [words for words in COMMANDS if " " not in words]
    assert [n for n in names if n not in ("Exit", "usage")][: len(top)] == top


@pytest.mark.parametrize("words", COMMANDS)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_every_command_explains_itself_within_80_columns(steady, words, option):
    shown = steady(*words.split(), option)
    assert shown.code == 0
    assert shown.err == ""
    assert f"Usage: steady {words}" in shown.out
    for name, _, _ in COMMANDS[words]:
        assert name in shown.out
    assert [line for line in shown.out.splitlines() if len(line) > 80] == []


def test_defaults_are_shown(steady):
    shown = " ".join(steady("tune", "--help").out.split())
    for default in ("[default: auto]", "[default: same]", "[default: 3m]"):
        assert default in shown


def test_the_version_is_shown(steady):
    import steadytorch

    shown = steady("--version")
    assert (shown.code, shown.err) == (0, "")
    assert steadytorch.__version__ in shown.out


def test_exit_codes_are_explained(steady):
    shown = " ".join(steady("--help").out.split())
    for code in ("0 done", "2 bad usage", "3 this machine cannot", "130 interrupted"):
        assert code in shown


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["tunne", "x"], "tunne"),
        (["tune"], "WORKLOAD"),
        (["tune", "resnet18", "--no-such"], "--no-such"),
        (["tune", "resnet18", "--precision", "fp8"], "'same', 'tf32', 'bf16', 'fp16'"),
        (["tune", "resnet18", "--objective", "speed"], "'throughput', 'contended'"),
        (["tune", "resnet18", "--batch", "0"], "0"),
        (["tune", "resnet18", "--batch", "many"], "many"),
        (["tune", "resnet18", "--seed", "x"], "x"),
        (["tune", "resnet18", "--tolerance", "little"], "little"),
        (["tune", "resnet18", "extra"], "extra"),
        (["tune", "resnet18", "--store"], "--store"),
        (["plans", "show"], "ID"),
        (["measure"], "WORKLOAD"),
        (["measure", "resnet18", "--processes", "0"], "0"),
        (["measure", "resnet18", "--store", "x"], "--store"),
        (["compare", "resnet18"], "B"),
        (["compare", "resnet18", "resnet50", "resnet18"], "resnet18"),
        (["compare", "resnet18", "resnet50", "--metric", "p99"], "'latency', 'period'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_is_one_line_that_names_it(steady, words, named):
    ended = steady(*words)
    assert (ended.code, ended.out) == (2, "")
    assert named in only_line(ended.err)


@pytest.mark.parametrize("words", [[], ["plans"]])
def test_without_a_command_the_help_is_shown(steady, words):
    ended = steady(*words)
    assert ended.code == 2
    assert "Usage: steady" in ended.err
    assert "Commands:" in ended.err


# -- WORKLOAD@TRANSFORMS ------------------------------------------------------------------------

CPU = DeviceFacts(device="cpu", cores_physical=2, cores_logical=4)


@pytest.mark.parametrize(
    ("name", "spec", "candidate"),
    [
        ("resnet50", "resnet50", []),
        ("resnet50@channels_last", "resnet50", ["channels_last"]),
        (
            "tiny.py:small@inference_mode + compile(default)",
            "tiny.py:small",
            ["compile(default)", "inference_mode"],
        ),
        ("user@host/tiny.py:small", "user@host/tiny.py:small", []),
        ("a@b/tiny.py:small@inference_mode", "a@b/tiny.py:small", ["inference_mode"]),
    ],
)
def test_transforms_stand_behind_the_workload(name, spec, candidate, monkeypatch):
    asked = []
    model = nn.Conv2d(3, 4, 3).eval()
    loaded = Workload(model, (torch.ones(1, 3, 8, 8),))
    monkeypatch.setattr(options, "load", lambda spec, batch: asked.append(spec) or loaded)
    found, given = options.load_with_transforms(name, CPU, batch=None)
    assert (found, asked, [str(each) for each in given]) == (loaded, [spec], candidate)


@pytest.mark.parametrize("setting", ["cuda_graph", "cudnn_engines", "tf32", "fused_kernels"])
@pytest.mark.parametrize("command", [["measure"], ["compare", "tiny.py:small"]])
def test_transforms_for_another_device_are_refused_before_anything_is_timed(
    steady, command, setting
):
    ended = steady(*command, f"tiny.py:small@{setting}", "--device", "cpu")
    assert (ended.code, ended.out) == (3, "")
    assert f"{setting}" in only_line(ended.err)
    assert "cannot be applied here: no CUDA device" in ended.err


def test_transforms_that_may_do_nothing_are_told(monkeypatch, capsys):
    loaded = Workload(nn.Linear(3, 4).eval(), (torch.ones(1, 3),))
    monkeypatch.setattr(options, "load", lambda spec: loaded)
    for quiet in (False, True):
        options.load_with_transforms("small@prefetch", CPU, quiet=quiet)
    assert capsys.readouterr().err.splitlines() == [
        "steady: note: a search would leave out prefetch here: the workload has no loader: "
        "create it with Workload.from_loader"
    ]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("", "'' is not a transform: write a name"),
        ("sorcery", "unknown transform 'sorcery': use one of openvino, onnxruntime, "),
        ("inference_mode+", "'' is not a transform"),
        ("compile(fastest)", "'compile(fastest)' is not a variant of compile; available: compile("),
        ("compile(", "'compile(' is not a transform"),
        ("cuda_graph(warp)", "is not a variant of cuda_graph"),
        ("inference_mode+inference_mode", "inference_mode is listed twice"),
        ("cast_weights+autocast", "cast_weights and autocast both control the dtype"),
    ],
)
def test_wrong_transforms_are_refused(settings, said):
    with pytest.raises(UsageError) as caught:
        options.load_with_transforms(f"resnet18@{settings}", CPU)
    assert said in str(caught.value)


@pytest.mark.parametrize("command", [["measure"], ["compare", "resnet18"]])
def test_wrong_transforms_end_the_command_with_one_line(steady, command):
    ended = steady(*command, "resnet18@sorcery")
    assert (ended.code, ended.out) == (2, "")
    assert "unknown transform 'sorcery'" in only_line(ended.err)
