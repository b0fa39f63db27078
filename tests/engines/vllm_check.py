#!/usr/bin/env python3
"""Checks that vLLM's CPU build can run on this machine, and that the installed one does.

    vllm_check.py              prints the library that the package will pick here; or ends with exit
                               code 1 and this machine's deficiencies, one per line
    vllm_check.py --installed  run by the Python of the install: its kernels load, and its
                               log-probabilities compile

Two parts of this build fail late and without a clear message, so both are tried before serving:

* It brings three libraries (AVX2, AVX-512, AVX-512 with bf16) and picks one by the processor.
  Importing another one ends the process with an illegal instruction.
* The first call with log-probabilities compiles C++ (torch.compile of
  `batched_count_greater_than`, also with --enforce-eager). Without a working compiler, or without
  torch's or Python's headers, that call ends the engine: "InvalidCxxCompiler" or "C++ compile
  error" in its log, and the server is gone.
"""

import os
import pathlib
import platform
import subprocess
import sys
import sysconfig
import tempfile

# The flags that torch requires for AVX-512.
AVX512 = {"avx512f", "avx512vl", "avx512bw", "avx512dq"}
# Every extension that torch compiles is an OpenMP library for this Python.
SOURCE = "#include <omp.h>\n#include <Python.h>\n#include <vector>\nint answer() { return omp_get_max_threads(); }\n"


def flags(cpuinfo):
    """The flags of the first processor in the text of /proc/cpuinfo."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return set(value.split())
    return set()


def here():
    """The flags of this machine's processor."""
    return flags(pathlib.Path("/proc/cpuinfo").read_text())


def library(has):
    """The library that the package picks on a processor with these flags; None if it has none."""
    if AVX512 <= has:
        return "_C" if "avx512_bf16" in has else "_C_AVX512"
    return "_C_AVX2" if "avx2" in has else None


def compiler(environment):
    """The C++ compiler that torch uses."""
    return environment.get("CXX", "g++")


def compiles(cxx, include):
    """"" if `cxx` makes a library out of SOURCE, else the reason."""
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "try.cpp"
        source.write_text(SOURCE)
        argv = [cxx, "-shared", "-fPIC", "-fopenmp", "-std=c++20", f"-I{include}", source, "-o", f"{folder}/try.so"]
        try:
            done = subprocess.run(argv, capture_output=True, text=True)
        except OSError as error:
            return str(error)
    if done.returncode == 0:
        return ""
    return first_error(done.stderr) or f"exit code {done.returncode}"


def first_error(text):
    """The line of a compiler's or torch's message that names the error."""
    lines = text.strip().splitlines()
    return next((line for line in lines if "error:" in line), lines[0] if lines else "")


def lacking(environment=None, has=None, machine=None, include=None):
    """Reasons why vLLM cannot run here, in words."""
    environment = os.environ if environment is None else environment
    machine = machine or platform.machine()
    if machine != "x86_64":
        return [f"vLLM's CPU build is pinned for x86_64 here, this machine is {machine}"]
    found = []
    if library(here() if has is None else has) is None:
        found.append("vLLM's CPU build needs a processor with AVX2, this one has none")
    include = include or sysconfig.get_path("include")
    if why := compiles(compiler(environment), include):
        hint = "python3-dev" if "Python.h" in why else "g++"
        found.append(f"vLLM compiles C++ at its first call with log-probabilities and dies if it cannot; "
                     f"{compiler(environment)} does not compile (Debian package {hint}, or set CXX): {why}")
    return found


def loaded():
    """The package's libraries that this process has mapped."""
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split()[-1] for line in lines if "/vllm/_C" in line}
    return sorted(pathlib.Path(path).name.partition(".")[0] for path in paths)


def installed():
    """As in the server: the package loads the kernels that it picks, and ranks a token."""
    import torch
    from vllm.platforms import current_platform
    current_platform.import_kernels()  # it swallows its import errors, so look for the kernels below
    if not hasattr(torch.ops._C, "rms_norm"):
        sys.exit(f"vLLM has loaded no kernels ({loaded()}); this processor wants "
                 f"{library(here())}")
    from vllm.v1.sample.sampler import Sampler
    logprobs = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.7, 0.2]]).log()
    try:
        ranks = Sampler.gather_logprobs(logprobs, 1, torch.tensor([1, 1])).selected_token_ranks.tolist()
    except RuntimeError as error:
        sys.exit(f"vLLM's log-probabilities do not compile, they would end a server: {first_error(str(error))}")
    if ranks != [3, 1]:
        sys.exit(f"vLLM ranks tokens as {ranks} instead of [3, 1]")
    print(f"vLLM's kernels are {', '.join(loaded())}; its log-probabilities compile")


if __name__ == "__main__":
    if "--installed" in sys.argv[1:]:
        installed()
    elif words := lacking():
        sys.exit("\n".join(words))
    else:
        print(library(here()))
