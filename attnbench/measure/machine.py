"""The machine behind a number: facts that two rows must share before they may be compared."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from attnbench.errors import UsageError
from attnbench.measure import cgroup
from attnbench.measure.cgroup import text_of
from attnbench.text import quantity, without_secrets
from attnbench.units import format_bytes

NOISY = 0.02

LOOK = 0.15

MEMORY_TOLERANCE = 0.05
"""Share by which the memories of two machines of one class may differ."""

RATES_WITHIN = 0.1
"""Share by which the rates of two machines in one run may differ."""


CORES = frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))
"""Cores that this process may use, as it began: ``OMP_PROC_BIND``, ``OMP_PLACES`` or ``GOMP_CPU_AFFINITY`` bind the
thread that imports torch to one of them."""


def available_cores() -> int:
    """Cores that this process may use; a container's quota may allow fewer than there are."""
    quota = cgroup.cores()
    return len(CORES) if quota is None else max(1, min(len(CORES), int(quota)))


def default_threads() -> int:
    """``OMP_NUM_THREADS`` if it is set, else the number of cores that this process may use."""
    return _asked_threads() or available_cores()


def thread_warnings(threads: int) -> list[str]:
    """Warnings if the number of threads is not that of the cores, or a control group withholds cores."""
    cores, visible, asked = available_cores(), len(CORES), _asked_threads()
    said = []
    if cores < visible:
        said.append(f"the control group allows {cgroup.cores():.3g} of {visible} cores")
    if threads > cores:
        said.append(f"{threads} threads on {quantity(cores, 'core')} wait for each other; use --threads {cores}")
    elif threads == asked and threads < cores:
        said.append(f"OMP_NUM_THREADS leaves {threads} of {cores} cores; --threads {cores} uses all")
    return said


def refuse_binding(threads: int, of_torch: Collection[str]) -> None:
    """Raise UsageError if a variable binds torch's threads, given by their numbers, to fewer cores than ``threads``."""
    named = [name for name in ("OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY") if name in os.environ]
    cores = len({core for one in of_torch if named for core in os.sched_getaffinity(int(one))})
    if 0 < cores < min(threads, len(of_torch)):
        bound = f"{named[0]} binds {threads} threads to {quantity(cores, 'core')}, where they wait for each other"
        raise UsageError(f"{bound}; unset it, or give --threads {cores}")


def throttling_warning(periods: int) -> str | None:
    """Warning if the control group used up its processor time in ``periods`` periods; None for 0."""
    held = f"held back {quantity(periods, 'time')} by the CPU quota of the control group"
    return f"{held}; use fewer --threads" if periods else None


def _asked_threads() -> int | None:
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isascii() and first.isdigit() and int(first) > 0 else None


def total_memory_bytes() -> int | None:
    """Physical memory, or a smaller control-group limit; None if neither can be read."""
    sizes = []
    with suppress(ValueError, OSError, AttributeError):
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limit = cgroup.memory_bytes()
    return min([*sizes, limit] if limit else sizes, default=None)


def address_space() -> int | None:
    """Bytes of address space that this process has; None if the kernel does not say."""
    fields = text_of(Path("/proc/self/statm")).split()
    return int(fields[0]) * os.sysconf("SC_PAGE_SIZE") if fields else None


def available_memory_bytes() -> int | None:
    """Memory available without swapping and within the limits of control groups; None if unknown."""
    free = cgroup.free_memory_bytes()
    sizes = [] if free is None else [free]
    for line in text_of(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            sizes.append(int(line.split()[1]) * 1024)
    return min(sizes, default=None)


def devices() -> list[str]:
    """The devices that torch finds on this machine, fastest first."""
    import torch

    there = ["cpu"]
    if torch.cuda.is_available():
        there = ["cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count())), *there]
    if torch.backends.mps.is_available():
        there = ["mps", *there]
    return there


def resolve_device(name: str, *, elsewhere: bool = False) -> str:
    """``auto`` -> the fastest device there is; otherwise the name, if torch has it.

    With ``elsewhere`` nothing runs here, and a named device need not be there. Raises UsageError with the devices there
    are.
    """
    there = devices()
    if name == "auto":
        return there[0]
    if name not in there and not elsewhere:
        raise UsageError(f"no device {name!r} on this machine; there is {', '.join(there)}")
    return name


def refuse_graph(launch: str, device: str) -> None:
    """Raise UsageError if CUDA graphs are asked for on a device that has none."""
    if launch == "graph" and not device.startswith("cuda"):
        raise UsageError(f"--launch graph: {device} has no CUDA graphs; leave it out, or add --device cuda")


@cache
def describe(device: str) -> dict[str, Any]:
    """Processor or GPU, memory, system and versions: the content of ``environment.json``."""
    import torch

    facts: dict[str, Any] = {
        "device": device,
        "processor": processor(),
        "cores": available_cores(),
        "memory_bytes": total_memory_bytes(),
        "system": f"{platform.system()} {platform.machine()}",
        "instructions": instructions(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": version("numpy"),
    }
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(torch.device(device))
        facts["gpu"] = properties.name
        facts["gpu_memory_bytes"] = properties.total_memory
        facts["cuda"] = torch.version.cuda
        with suppress(RuntimeError):  # another cuDNN than torch was built with
            facts["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # torch leaves it so
        with suppress(PackageNotFoundError):
            facts["triton"] = version("triton")
    return facts


def machine_id(device: str) -> str:
    """Eight hex digits that stand for the facts above: rows with different ids are never compared silently."""
    return id_of(describe(device))


def id_of(facts: dict[str, Any]) -> str:
    """The id of the machine with these facts, as :func:`describe` gives them."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]


def class_facts(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Facts that two runs share if their numbers may be compared; None for a fact that a run, of any age, lacks.

    The instructions of a processor are missing for a GPU, and for a run that is older than the fact, which may still be
    compared with any. Memory is left out: two boots of one machine differ in it by kilobytes (see
    :func:`memory_bytes`). So are Python, which decides no number but times of short calls, and the libraries of matrix
    products, which are chosen for each run (see :func:`products_of`).
    """
    machine = _described(environment)
    torch = machine.get("torch")
    known = {} if "gpu" in machine or "instructions" not in machine else {"instructions": machine["instructions"]}
    return {
        **known,
        "processor": machine.get("gpu") or machine.get("processor"),
        "cores": machine.get("cores"),
        "system": machine.get("system"),
        "device": str(machine.get("device", "")).partition(":")[0],
        "torch": None if torch is None else ".".join(str(torch).split(".")[:2]),
        "cuda": machine.get("cuda"),
        "threads": environment.get("threads"),
        "process": environment.get("process"),
    }


def machine_class(environment: Mapping[str, Any]) -> str:
    """Eight hex digits of :func:`class_facts`: only runs of one class are compared without a warning."""
    return hashlib.sha256(json.dumps(class_facts(environment), sort_keys=True).encode()).hexdigest()[:8]


PRODUCTS = ("float32_products", "window_products")
"""Facts of a run, and not of its machine: which library multiplied, as a probe found when the run began."""


def products_of(environment: Mapping[str, Any]) -> dict[str, str]:
    """The known libraries that multiplied in a run, by :data:`PRODUCTS`; rows of different ones are not compared."""
    return {name: environment[name] for name in PRODUCTS if isinstance(environment.get(name), str)}


def differing_products(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The libraries in which two runs are known to differ: ``window_products: oneDNN and default``."""
    ours, theirs = products_of(a), products_of(b)
    return [f"{name}: {ours[name]} and {theirs[name]}" for name in ours if theirs.get(name, ours[name]) != ours[name]]


THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
"""Variables that a measuring process gets with the number of its threads."""

_NAMES = """
ATEN_CPU_CAPABILITY CUBLASLT_WORKSPACE_SIZE CUBLAS_EMULATE_DOUBLE_PRECISION CUBLAS_EMULATE_SINGLE_PRECISION
CUBLAS_EMULATION_STRATEGY CUBLAS_WORKSPACE_CONFIG CUDA_LAUNCH_BLOCKING CUDNN_DETERMINISTIC GLIBC_TUNABLES
DNNL_CPU_ISA_HINTS DNNL_DEFAULT_FPMATH_MODE DNNL_MAX_CPU_ISA DNNL_PRIMITIVE_CACHE_CAPACITY DNNL_VERBOSE
ONEDNN_CPU_ISA_HINTS ONEDNN_DEFAULT_FPMATH_MODE ONEDNN_MAX_CPU_ISA ONEDNN_PRIMITIVE_CACHE_CAPACITY ONEDNN_VERBOSE
GOMP_CPU_AFFINITY GOMP_SPINCOUNT GOMP_STACKSIZE KMP_AFFINITY KMP_BLOCKTIME KMP_DETERMINISTIC_REDUCTION
KMP_DYNAMIC_MODE KMP_FORCE_REDUCTION KMP_HW_SUBSET KMP_LIBRARY KMP_STACKSIZE KMP_TPAUSE LD_PRELOAD
MALLOC_ARENA_MAX MALLOC_ARENA_TEST MALLOC_CONF MALLOC_MMAP_MAX_ MALLOC_MMAP_THRESHOLD_ MALLOC_PERTURB_
MALLOC_TOP_PAD_ MALLOC_TRIM_THRESHOLD_ MKL_CBWR MKL_DEBUG_CPU_TYPE MKL_DISABLE_FAST_MM MKL_DOMAIN_NUM_THREADS
MKL_DYNAMIC MKL_ENABLE_INSTRUCTIONS MKL_FAST_MEMORY_LIMIT MKL_INTERFACE_LAYER MKL_NUM_STRIPES MKL_THREADING_LAYER
MKL_VERBOSE PYTHONDEVMODE PYTHONMALLOC PYTHONTRACEMALLOC
NVIDIA_TF32_OVERRIDE OMP_DYNAMIC OMP_MAX_ACTIVE_LEVELS OMP_NESTED OMP_PLACES OMP_PROC_BIND OMP_SCHEDULE
OMP_STACKSIZE OMP_THREAD_LIMIT OMP_WAIT_POLICY OPENBLAS_CORETYPE PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF
PYTORCH_ENABLE_MPS_FALLBACK PYTORCH_JIT PYTORCH_MPS_FAST_MATH PYTORCH_MPS_PREFER_METAL
PYTORCH_NO_CUDA_MEMORY_CACHING PYTORCH_TUNABLEOP_ENABLED TORCHDYNAMO_DISABLE
TORCHINDUCTOR_COORDINATE_DESCENT_TUNING TORCHINDUCTOR_CPP_WRAPPER TORCHINDUCTOR_EMULATE_PRECISION_CASTS
TORCHINDUCTOR_FREEZING TORCHINDUCTOR_MAX_AUTOTUNE TORCHINDUCTOR_MAX_AUTOTUNE_GEMM
TORCHINDUCTOR_MAX_AUTOTUNE_POINTWISE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE TORCH_BLAS_PREFER_CUBLASLT
TORCH_BLAS_PREFER_HIPBLASLT TORCH_COMPILE_DISABLE TORCH_CUDNN_SDPA_PREFERRED TORCH_LINALG_PREFER_CUSOLVER
TORCH_LINALG_PREFER_MAGMA TRITON_F32_DEFAULT
"""
VARIABLES = frozenset({*THREADS, *_NAMES.split()})
"""Variables that change how, or how fast, Python and the libraries below torch compute. Names and not their
beginnings: others that begin alike hold tokens and licences."""


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Those of :data:`VARIABLES` that are set, in the order of their names."""
    return {name: without_secrets(value) for name, value in sorted(environment.items()) if name in VARIABLES}


def differing_variables(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The Python and the variables in which two runs are known to differ: ``variable MKL_CBWR: unset and COMPATIBLE``.

    Python takes a part of each short call. Variables outside :data:`VARIABLES` are left out.
    """
    one, other = (".".join(str(_described(run).get("python", "")).split(".")[:2]) for run in (a, b))
    pythons = [f"python: {one} and {other}"] if one and other and one != other else []
    ours, theirs = (one["variables"] if isinstance(one.get("variables"), dict) else None for one in (a, b))
    if ours is None or theirs is None:
        return pythons
    both = [(name, ours.get(name, "unset"), theirs.get(name, "unset")) for name in sorted(VARIABLES - set(THREADS))]
    return pythons + [f"variable {name}: {one} and {other}" for name, one, other in both if one != other]


def versions(environment: Mapping[str, Any]) -> dict[str, str]:
    """Library -> its version in a run; a run of any age lacks some."""
    plugins = {name: one for name, one in environment.get("plugins", {}).items() if "." in one}  # and not a digest
    known = {**_described(environment), "attnbench": environment.get("attnbench")}
    ours = {name: known[name] for name in _LIBRARIES if known.get(name)}
    return {**ours, **environment.get("libraries", {}), **plugins}


_LIBRARIES = ("torch", "python", "numpy", "triton", "cudnn", "attnbench")


def differing_versions(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The libraries whose versions differ between two runs that may be compared: ``numpy: 2.3.5 and 2.4.6``."""
    ours, theirs = versions(a), versions(b)
    return [f"{name}: {one} and {theirs[name]}" for name, one in ours.items() if theirs.get(name, one) != one]


def memory_bytes(environment: Mapping[str, Any]) -> int | None:
    """Memory of the device that a run measured on: of the GPU, or of the machine; None if unknown."""
    machine = _described(environment)
    memory = machine.get("gpu_memory_bytes", machine.get("memory_bytes"))
    return memory if isinstance(memory, int) else None


def rates(environment: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Each rate that was measured when a run began, by a name for people; in FLOP/s and bytes/s."""
    for dtype, rate in (environment.get("matmul_rate") or {}).items():
        yield f"matmul rate in {dtype}", rate
    for size, rate in environment.get("copy_rates") or ():
        yield f"copy rate of {format_bytes(size)}", rate


def host() -> str:
    """Eight hex digits that stand for this host, the same after a restart."""
    return hashlib.sha256(f"{platform.node()}\n{text_of(Path('/etc/machine-id'))}".encode()).hexdigest()[:8]


def _described(environment: Mapping[str, Any]) -> dict[str, Any]:
    machine = environment.get("environment")
    return machine if isinstance(machine, dict) else {}


def load_warning() -> str | None:
    """Warning if other programs keep half a core busy now; the load average still counts programs that ended."""
    others = OtherLoad()
    time.sleep(LOOK)
    busy, cores = others.cores(), available_cores()
    if busy is None or busy < 0.5:
        return None
    there = quantity(cores, "core")
    return f"other programs use {busy:.1f} of {there} as the run begins: close them or expect wide intervals"


class OtherLoad:
    """Cores that other programs, or other guests of the same host, have kept busy since this object was made."""

    def __init__(self, also_own: Callable[[], float] = lambda: 0.0) -> None:
        """Begin; ``also_own`` gives processor time of further processes of ours, apart from this one and its ended
        children."""
        self._also_own = also_own
        self._wall, self._busy, self._own = time.monotonic(), _busy_seconds(), _own_seconds() + also_own()

    def cores(self) -> float | None:
        """Cores kept busy; None if the kernel does not say, or too little time has passed for its counter."""
        wall, busy = time.monotonic() - self._wall, _busy_seconds()
        if busy is None or self._busy is None or wall < 0.1:
            return None
        own = _own_seconds() + self._also_own() - self._own
        return max(0.0, (busy - self._busy - own) / wall)


def noise_warning(noise: float | None, others: float | None) -> str | None:
    """Warning, with advice, if one program seems to differ from itself by over 2 % or the noise is unknown."""
    if noise is None:
        return "noise unknown: too few pairs of undisturbed samples; close other programs or raise --min-time"
    if noise <= NOISY:
        return None
    if others is None:
        return f"noise {noise:.0%}: close other programs or raise --min-time"
    if others < 0.2:
        return f"noise {noise:.0%} with no other program at work: a core changes its speed; raise --min-time"
    return f"noise {noise:.0%}: other programs use {others:.1f} cores; close them or raise --min-time"


def _busy_seconds() -> float | None:
    """Seconds that all cores together have worked or lost to the host; None without /proc/stat."""
    fields = text_of(Path("/proc/stat")).partition("\n")[0].split()
    if len(fields) < 9 or fields[0] != "cpu":
        return None
    user, nice, system, _idle, _wait, irq, softirq, steal = (int(field) for field in fields[1:9])
    return (user + nice + system + irq + softirq + steal) / float(os.sysconf("SC_CLK_TCK"))


def _own_seconds() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def processor() -> str:
    """The processor's name, as the system knows it."""
    for line in text_of(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or sys.platform


_INSTRUCTIONS = re.compile(r"avx2|avx512(f|_bf16|_fp16|_vnni)|amx_\w+|avx10\S*|asimd(hp|fhm)|bf16|i8mm|sve\w*")
"""Flags of processors that decide which kernels multiply, and how precisely."""
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


def instructions() -> str:
    """The processor's instructions that torch and oneDNN may use; one name may stand for several processors."""
    import torch

    lines = text_of(Path("/proc/cpuinfo")).splitlines()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "").split()
    limits = [f"{name}={os.environ[name]}" for name in _LIMITS if name in os.environ]
    return " ".join([torch.backends.cpu.get_cpu_capability(), *sorted(filter(_INSTRUCTIONS.fullmatch, flags)), *limits])
