"""Writes empty stand-ins for the CUDA libraries that PyPI's torch is linked against.

The x86 build of torch on PyPI is the CUDA one: without 3 GB of CUDA libraries `import torch` fails
in the dynamic linker, although a machine without a GPU never calls them. The linker only needs
every name that is bound at load time to exist, so each library is replaced by one whose functions
do nothing: the registration calls of load time answer 0, all others answer 100, which is CUDA's own
"no device". torch then says `cuda.is_available() == False`, as it does with the real ones.

    cuda_stand_ins.py TORCH_LIB_DIR
"""

import pathlib
import re
import subprocess
import sys


def linked(folder):
    """(undefined names with their version, needed libraries) that the folder itself does not
    provide."""
    wanted, defined, needed, present = {}, set(), set(), set()
    for library in sorted(folder.glob("*.so*")):
        present.add(library.name)
        text = subprocess.run(["readelf", "--dyn-syms", "-d", "-W", library], capture_output=True, text=True).stdout
        for line in text.splitlines():
            columns = line.split()
            if "(NEEDED)" in line:
                needed.add(line.split("[")[1].rstrip("]"))
            elif len(columns) > 7 and columns[0].endswith(":") and columns[4] in ("GLOBAL", "WEAK"):
                name, _, version = columns[7].partition("@")
                if columns[6] == "UND":
                    wanted[name] = version.strip("@") or wanted.get(name, "")
                else:
                    defined.add(name)
    return {n: v for n, v in wanted.items() if n not in defined}, needed - present


def stand_in(folder, soname, names, version):
    source, script = folder / "stand_in.c", folder / "stand_in.map"
    answers = (f"long {n}(void) {{ return {0 if n.startswith('__cuda') else 100}; }}\n" for n in names)
    source.write_text("".join(answers))
    script.write_text(f"{version} {{ *; }};\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-fno-builtin", f"-Wl,-soname,{soname}",
                    f"-Wl,--version-script={script}", "-o", folder / soname, source], check=True)
    source.unlink()
    script.unlink()


def main():
    folder = pathlib.Path(sys.argv[1])
    wanted, needed = linked(folder)
    unversioned = sorted(n for n, v in wanted.items() if not v and re.match("cu|nccl|nv", n))
    for soname in sorted(n for n in needed if re.match("lib(cu|nccl|nv)", n)):
        version = "NVSHMEM" if "nvshmem" in soname else soname
        stand_in(folder, soname, sorted(n for n, v in wanted.items() if v == version) or unversioned, version)


if __name__ == "__main__":
    main()
