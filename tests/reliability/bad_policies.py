#!/usr/bin/env python3
"""Invalid policy files: each is refused within a second, the old ones stay in force.

    bad_policies.py [--foretell BIN]

Anchors that multiply, 10 MiB, a link out of the folder and links that lead nowhere, a FIFO, a
folder, half a file, bytes that are not text. After each the file is removed and the policies must
be in force as before; meanwhile foretell_config_synchronized must be 0. A link that can be read is
a file like any other (a ConfigMap is made of them).
"""

import contextlib
import json
import os
import time
import urllib.error
import urllib.request

import kit

GOOD = "version: 1\nname: good\nmode: plain\n"


def laughs(depth=12):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, depth)]
    return "\n".join([*lines, f"version: 1\nname: bad\nmatch: {{ models: *a{depth - 1} }}\n"])


def cases(folder):
    """Names, and functions that write the file `bad.yaml`."""
    file = folder / "bad.yaml"
    yield "anchors that multiply", lambda: file.write_text(laughs())
    yield "10 MiB of comment", lambda: file.write_text("version: 1\nname: bad\n" + "# x\n" * (10 * kit.MIB // 4))
    yield "10 MiB in one text", lambda: file.write_text(f"version: 1\nname: bad\nmatch: {{ models: ['{'x' * 10 * kit.MIB}'] }}\n")
    yield "10 MiB of lists in lists", lambda: file.write_text("version: 1\nname: " + "[" * 10 * kit.MIB)
    yield "100,000 keys", lambda: file.write_text("version: 1\nname: bad\n" + "".join(f"k{n}: 1\n" for n in range(100_000)))
    yield "a link to a file outside that is not a policy", lambda: file.symlink_to("/etc/passwd")
    yield "a link to nothing", lambda: file.symlink_to(folder / "nowhere")
    yield "a link to itself", lambda: file.symlink_to(file)
    yield "a FIFO", lambda: os.mkfifo(file)
    yield "a folder", lambda: file.mkdir()
    yield "half a file", lambda: file.write_text("version: 1\nname: bad\nmatch: { mod")
    yield "an empty file", lambda: file.write_text("")
    yield "bytes that are no text", lambda: file.write_bytes(b"version: 1\nname: \xff\xfe\n")
    yield "a NUL", lambda: file.write_bytes(b"version: 1\nname: a\x00b\n")
    yield "two documents", lambda: file.write_text(GOOD + "---\n" + GOOD)


def reload(proxy):
    """Status and seconds."""
    begun = time.perf_counter()
    try:
        with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{proxy.admin}/api/reload", data=b""), timeout=60) as answer:
            return answer.status, time.perf_counter() - begun
    except urllib.error.HTTPError as error:
        error.read()
        return error.code, time.perf_counter() - begun
    except OSError:
        return 0, time.perf_counter() - begun


def in_force(proxy):
    return [policy["name"] for policy in json.loads(proxy.page("/api/policies"))["policies"]]


def bad(args, numbers):
    taken, longest, unsaid, lost, kept, most = [], (0.0, ""), [], [], 0, 0
    with contextlib.ExitStack() as stack:
        proxy = kit.Proxy(stack, args.foretell, kit.before("127.0.0.1:9"), policies={"good.yaml": GOOD})
        before, base = in_force(proxy), proxy.resident()
        for name, put in cases(proxy.folder / "policies"):
            put()
            status, took = reload(proxy)
            longest, kept = max(longest, (took, name)), kept + 1
            most = max(most, proxy.resident() - base)
            print(f"  {name}: HTTP {status} in {took * 1e3:.0f} ms")
            if status != 422:
                taken.append(name)
            elif proxy.metric("foretell_config_synchronized") != 0:
                unsaid.append(name)
            if in_force(proxy) != before and name not in taken:
                lost.append(name)
            file = proxy.folder / "policies/bad.yaml"
            if file.is_dir() and not file.is_symlink():
                file.rmdir()
            else:
                file.unlink()
            if reload(proxy)[0] != 200 or in_force(proxy) != before or proxy.metric("foretell_config_synchronized") != 1:
                lost.append(f"{name}, after it was taken out")
    for what, names in (("taken", taken), ("not reported", unsaid), ("the old ones were lost", lost)):
        if names:
            print(f"  {what}: {', '.join(names)}")
    numbers.note(21, "files that cannot be taken", kept)
    numbers.at_most(21, "of them taken", len(taken), 0)
    numbers.at_most(21, "of them after which foretell_config_synchronized was not 0", len(unsaid), 0)
    numbers.at_most(21, "of them after which other policies were in force", len(lost), 0)
    numbers.at_most(21, f"the longest time of a reload ({longest[1]})", longest[0], 1.0, "s")
    numbers.at_most(21, "memory", most / kit.MIB, 64.0, "MiB")


if __name__ == "__main__":
    kit.main(bad, __doc__)
