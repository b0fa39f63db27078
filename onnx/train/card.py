"""Writes the model cards from the reports of training and of the gate.

    card.py MODELS_DIR WORK_DIR GATE_REPORT.json
"""

import json
import pathlib
import sys

import torch

from corpus import DEBS, WHEELS

ROLES = {
    "target": ("The model that Foretell's demo, tests and benchmarks speculate for: a Llama of six layers with a "
               "byte-level BPE vocabulary of 8,192.",
               "From nothing; Muon and AdamW, batches of 12 x 512 tokens, later also 6 x 1024, a stage of repeated "
               "random tokens that teaches copying. The committed run tried random distances first, which taught "
               "nothing, and was taken back to before them."),
    "draft-same": ("A drafter for `target` with the same vocabulary: two layers.",
                   "Starts as the target's embedding, first and last layer; distilled (Kullback-Leibler) on the corpus "
                   "and on text that the target wrote."),
    "draft-other": ("A drafter for `target` with a vocabulary of its own (6,144, other merges): two layers.",
                    "Starts from draft-same's layers, its embedding rows as means of the other vocabulary's pieces; "
                    "then cross entropy on the corpus, no teacher."),
}


def data_section():
    wheels = ", ".join(f"{n} {v} ({licence})" for n, v, licence in WHEELS)
    debs = ", ".join(f"{n} ({licence})" for n, licence in DEBS)
    return (f"Python sources: the standard library of CPython 3.11 (PSF-2.0), {wheels}. "
            f"Documentation sources from Debian 12 packages: {debs}. "
            "Documents: whole files, documentation pages, question and answer pairs made from docstrings, and "
            "rewrites (a piece of a file, `<|rewrite|>` with an instruction, the piece changed), which are 46 % of "
            "the documents. Whole files (4 %, by a hash of their name) are held out for evaluation and workloads.")


def acceptance(name, gate):
    rows = []
    for workload in ("completion", "rewrite", "prose", "chat", "hostile"):
        row = gate[workload]
        if name == "target":
            got = row["lookup_4"], row["lookup_8"]
            rows.append(f"| {workload} | {row['not_looping']} of {row['prompts']} | {got[0]['acceptance']} | "
                        f"{got[0]['E[N]']} | {got[1]['E[N]']} |")
        elif row.get(name):
            rows.append(f"| {workload} | {row['not_looping']} of {row['prompts']} | {row[name]['hit']} | {row[name]['E[N]']} |")
    if name == "target":
        head = ("Prompt lookup on the target's plain greedy output (the prompts of tests/workloads, looping outputs left out):\n\n"
                "| workload | prompts | acceptance where it proposes | mean acceptance length, gamma 4 | gamma 8 |\n|---|---|---|---|---|\n")
    else:
        head = ("Against the target's plain greedy output (the prompts of tests/workloads, looping outputs left out). `agreement`: how "
                "often the drafter's first choice is the target's; length: mean acceptance length at gamma 4"
                + (", counted in the drafter's tokens" if name == "draft-other" else "") + ".\n\n"
                "| workload | prompts | agreement | length |\n|---|---|---|---|\n")
    return head + "\n".join(rows)


OF_THE_TARGET = "The texts that the [target](../target/README.md#data) was trained on, with the licences listed there."


def main():
    models, work = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    gate = json.loads(pathlib.Path(sys.argv[3]).read_text())
    for name, (role, how) in ROLES.items():
        state = torch.load(work / name / "final.pt", map_location="cpu", weights_only=False)
        parameters = sum(p.numel() for p in state["model"].values())
        size = state["size"]
        report = ", ".join(f"{k} {v}" for k, v in state["report"].items())
        meaning = ("Agreement with the target's first choice on held-out text" if name == "draft-same"
                   else "Held-out loss in nats per token (`copy`: share of right tokens when random ones repeat)")
        megabytes = (models / name / "model.onnx").stat().st_size / 1e6
        (models / name / "README.md").write_text(f"""# foretell-{name}

{role}

* Licence: Apache-2.0 for the weights; the texts' own licences are below.
* Size: {parameters:,} parameters ({size['num_hidden_layers']} layers, hidden {size['hidden_size']}, {size['num_attention_heads']} heads, {size['num_key_value_heads']} KV heads of {size['head_dim']}, feed-forward {size['intermediate_size']}, vocabulary {size['vocab_size']:,}, tied embedding), {megabytes:.1f} MB, float16 values; context 2,048 (trained at up to {'1,024' if name == 'target' else '512'}).
* Training: {how} {state['steps']:,} steps in {state['minutes']:g} minutes on two cores shared with other work. `onnx/train/all.sh` repeats it; schedules go by the clock, so numbers vary with the machine.
* {meaning}: {report}.
* Step: {gate['step_ms'][name]} ms for one token at cache length 512, two CPU threads of a busy machine (target: {gate['step_ms']['target']} ms).

## Data

{data_section() if name == 'target' else OF_THE_TARGET}

## Acceptance

{acceptance(name, gate)}

## What it is not

A model to ask anything: it writes text that looks like Python and its documentation. It exists so that speculation, acceptance and benchmarks are real on a laptop.
""")


if __name__ == "__main__":
    main()
