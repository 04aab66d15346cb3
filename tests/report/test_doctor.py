from __future__ import annotations

import io
import subprocess
import sys

import msgspec
import pytest
from rich.console import Console

from steadytorch.device.facts import DeviceFacts
from steadytorch.device.observe import NOT_ON_CPU
from steadytorch.device.probes import Observation
from steadytorch.device.telemetry import Snapshot
from steadytorch.doctor import CheckUp
from steadytorch.measure.noise import NoiseFloor
from steadytorch.report.doctor import plain, render_doctor
from steadytorch.runtime.switch import Switch, traps

H200 = DeviceFacts(
    device="cuda",
    name="NVIDIA H200",
    compute_capability="9.0",
    sm_count=132,
    memory_bytes=150_109_880_320,
    l2_cache_bytes=62_914_560,
    driver="580.159.04",
    cuda="13.0",
    cudnn="9.19.0",
    triton="3.6.0",
    torch="2.11.0+cu130",
    python="3.12.3",
    cores_physical=8,
    cores_logical=16,
    cpu_name="Intel Xeon",
    isa="AVX512",
    os="Linux 6.18 x86_64",
)
NOW = Snapshot(
    device="cuda",
    load_average_1m=0.5,
    cpu_busy=0.03,
    cpu_steal=0.001,
    memory_free_bytes=128 << 30,
    gpu_memory_free_bytes=138 << 30,
    other_gpu_processes=2,
    sm_clock_mhz=345,
    sm_clock_max_mhz=1980,
    power_watts=76.5,
    power_limit_watts=700.0,
    temperature_celsius=31,
    clock_event_reasons=("power_cap", "gpu_idle"),
)
SWITCH = Switch(
    benchmark=False,
    benchmark_limit=10,
    deterministic=False,
    fp32_precision="tf32",
    environment={},
    no_effect="",
    traps=traps(10, False),
)
BLIND = Snapshot(device="cuda", unknown={"power_watts": "no permission to read it from NVML"})


NOISE = NoiseFloor(a_a_spread=0.0031, pairs=40, what="resnet18")


def _render(facts=H200, now=NOW, observations=(), noise=NOISE, switch=SWITCH, width=100):
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=False)
    found = CheckUp(
        environment=facts,
        state=now,
        observability=list(observations),
        noise_floor=noise,
        benchmark_mode=switch,
    )
    render_doctor(console, found)
    return out.getvalue()


def _row(text, label):
    return next(
        line.strip().removeprefix(label).strip()
        for line in text.splitlines()
        if line.strip().startswith(label + "  ")
    )


def test_the_machine_is_described():
    text = _render()
    assert _row(text, "GPU") == "NVIDIA H200"
    assert _row(text, "multiprocessors") == "132"
    assert _row(text, "GPU memory") == "139.8 GiB"
    assert _row(text, "L2 cache") == "60.0 MiB"
    assert _row(text, "MIG slice") == "none, a whole GPU"
    assert _row(text, "usable cores") == "8 physical, 16 logical"


def test_the_software_is_listed():
    text = _render()
    assert _row(text, "PyTorch") == "2.11.0+cu130"
    assert _row(text, "cuDNN") == "9.19.0"
    assert _row(text, "driver") == "580.159.04"


def test_the_state_is_shown_with_units_and_limits():
    text = _render()
    assert _row(text, "SM clock") == "345 of 1980 MHz"
    assert _row(text, "power") == "76 of 700 W"
    assert _row(text, "other GPU processes") == "2"
    assert _row(text, "clock held by") == "power cap, gpu idle"


def test_what_was_not_observed_is_unknown_never_zero():
    text = _render(now=BLIND)
    assert _row(text, "power") == "unknown"
    assert _row(text, "other GPU processes") == "unknown"
    assert _row(text, "clock held by") == "unknown"


def test_software_that_is_missing_says_why_in_its_place():
    unknown = {"cuda": "this PyTorch was built without CUDA", "triton": "not installed"}
    text = _render(facts=msgspec.structs.replace(H200, cuda=None, triton=None, unknown=unknown))
    assert _row(text, "CUDA") == "this PyTorch was built without CUDA"
    assert _row(text, "Triton") == "not installed"
    assert text.count("built without CUDA") == 1


def test_an_unknown_slice_is_not_taken_for_a_whole_gpu():
    facts = msgspec.structs.replace(H200, unknown={"mig_profile": "NVML does not answer"})
    assert _row(_render(facts=facts), "MIG slice") == "unknown"


def test_a_cpu_has_no_rows_of_a_gpu():
    facts = DeviceFacts(
        device="cpu", memory_bytes=24 << 30, unknown={"driver": NOT_ON_CPU, "sm_count": NOT_ON_CPU}
    )
    text = _render(facts=facts, now=Snapshot(device="cpu", unknown={"sm_clock_mhz": NOT_ON_CPU}))
    assert _row(text, "memory") == "24.0 GiB"
    assert not any(word in text for word in ("SM clock", "driver", "GPU", NOT_ON_CPU))


def test_what_is_hidden_is_gathered_by_reason_with_each_remedy():
    reason = "the NVML library is not installed"
    text = _render(
        now=Snapshot(device="cuda", unknown={"power_watts": reason, "sm_clock_mhz": reason}),
        observations=[
            Observation("NVML", False, reason, "install the driver"),
            Observation("GPU process list", False, reason, "use a GPU alone"),
        ],
    )
    assert text.count(reason) == 1
    assert "NVML, GPU process list, power, SM clock" in text
    assert "To do: install the driver." in text
    assert "To do: use a GPU alone." in text


def test_what_can_be_observed_is_listed_apart():
    text = _render(observations=[Observation("CPU steal", True, "0.00% since boot")])
    assert "Can be observed" in text
    assert "Cannot be observed" not in text
    assert "0.00% since boot" in text


def test_the_noise_floor_is_printed():
    assert _row(_render(), "A/A noise floor") == "0.31% over 40 pairs (resnet18)"


def test_the_benchmark_switch_is_shown_with_its_traps():
    text = _render(switch=SWITCH)
    assert _row(text, "benchmark") == "off"
    assert _row(text, "engines tried") == "10"
    assert _row(text, "float32 convolutions") == "tf32"
    assert "Before you switch it on:" in text
    assert "Shapes that ran before" in text


def test_a_switch_that_is_on_says_so():
    on = msgspec.structs.replace(SWITCH, benchmark=True, benchmark_limit=0, deterministic=True)
    text = _render(switch=on)
    assert (_row(text, "benchmark"), _row(text, "engines tried")) == ("on", "all")
    assert _row(text, "deterministic") == "on"
    assert "It is on:" in text


def test_a_switch_without_effect_says_why_and_nothing_else():
    idle = msgspec.structs.replace(SWITCH, no_effect="there is no CUDA device", traps=())
    text = _render(switch=idle)
    assert _row(text, "benchmark") == "off, without effect: there is no CUDA device"
    assert "switched on" not in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_longer_than_the_screen_or_eighty_columns(width):
    facts = msgspec.structs.replace(H200, name="N" * 300, os="a long name " * 30)
    text = _render(
        facts=facts,
        observations=[Observation("x" * 200, False, "y" * 200, "z " * 99)],
        switch=msgspec.structs.replace(SWITCH, environment={"TORCH_CUDNN_X": "v" * 200}),
        width=width,
    )
    assert max(map(len, text.splitlines())) <= min(width, 80)


HOSTILE = "[red]GPU[/red]\x1b[2J\x1b]0;pwned\x07\u202eevil\r\nfake line\x9b31m"


def test_hostile_text_is_shown_and_not_acted_on():
    facts = msgspec.structs.replace(H200, name=HOSTILE, unknown={HOSTILE: HOSTILE})
    now = msgspec.structs.replace(NOW, clock_event_reasons=(HOSTILE,))
    observations = [
        Observation(HOSTILE, True, HOSTILE),
        Observation("seen", False, HOSTILE + "!", HOSTILE),
    ]
    noise = NoiseFloor(0.1, 3, HOSTILE)
    switch = msgspec.structs.replace(SWITCH, environment={HOSTILE: HOSTILE}, no_effect=HOSTILE)
    text = _render(facts=facts, now=now, observations=observations, noise=noise, switch=switch)
    assert not set("\x1b\x07\u202e\r\x9b") & set(text)
    assert "[red]GPU[/red]\\x1b[2J" in text
    assert not any(line.lstrip().startswith("fake line") for line in text.splitlines())


def test_plain_keeps_letters_of_every_script_and_survives_lone_surrogates():
    assert plain("Größe 漢字") == "Größe 漢字"
    assert plain("a\ud800") == "a\\ud800"


def test_rendering_needs_no_torch():
    program = (
        "from steadytorch.report import doctor\nimport sys\n"
        "print([name for name in ('torch', 'pynvml') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
