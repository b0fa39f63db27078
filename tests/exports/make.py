"""Small models in the layouts of other exporters: the contents of tests/exports/.

    make.py model WORK                a Llama of two layers with random weights, as Hugging Face keeps it
    make.py optimum WORK OUT          WORK exported by optimum: in two precisions and in three layouts
    make.py genai WORK OUT            WORK exported by the model builder of onnxruntime-genai
    make.py head OUT                  a model of our own export with a head, both of random weights (needs numpy and onnx)
    make.py reference WORK OUT        PyTorch's results for WORK: logits of a fixed text, and its continuation

The exports are the tools' own output without the files that a drafter does not read. Versions are
in optimum.txt and genai.txt.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import sys

# Files of an export that a drafter reads; others (chat templates, tokenizer settings) are dropped.
KEPT = ("config.json", "generation_config.json", "genai_config.json", "tokenizer.json")
LINES = [
    "the quick brown fox jumps over the lazy dog",
    "a drafter proposes tokens and the target accepts or refuses them",
    "what was accepted is what the target would have written by itself",
    "int main(void) { return 0; }",
]
TEXT = "a drafter proposes what the target would have written"
CONTINUATION = 24


def tokenizer():
    """Byte-level, trained on four lines: 256 bytes, two special tokens and a few merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(LINES, trainer)
    return made


def make_model(work):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(240)
    words = tokenizer()
    config = LlamaConfig(
        vocab_size=words.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,  # GroupQueryAttention requires a multiple of 16
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
        # With weights of the usual size every row would be nearly the same, whatever the context.
        initializer_range=0.25,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).eval().save_pretrained(work)
    PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    ).save_pretrained(work)


def make_reference(work, out):
    """Logits of every position of the text, and the greedy continuation with its margins."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(work).eval()
    tokens = AutoTokenizer.from_pretrained(work).encode(TEXT, add_special_tokens=False)
    text, margins = list(tokens), []
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
        for _ in range(CONTINUATION):
            best = model(torch.tensor([text])).logits[0, -1].topk(2)
            margins.append(float(best.values[0] - best.values[1]))
            text.append(int(best.indices[0]))
    if min(margins) < 0.1 or 1 in text:
        raise SystemExit(f"take another seed: margins {margins}, text {text}")
    rows = [[round(value, 6) for value in row] for row in logits.tolist()]
    entry = {"text": TEXT, "tokens": tokens, "continuation": text[len(tokens):], "logits": rows}
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in entry.items())
    out.mkdir(parents=True, exist_ok=True)
    (out / "reference.json").write_text("{\n" + lines + "\n}\n")


def keep(made, out, graphs):
    """Moves the graphs and their descriptions to the output folder."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for name in [*KEPT, *graphs]:
        if (made / name).exists():
            shutil.copyfile(made / name, out / name)


def run(*command):
    print("$", " ".join(str(part) for part in command), flush=True)
    subprocess.run([str(part) for part in command], check=True)


def make_optimum(work, out):
    cli = pathlib.Path(sys.executable).with_name("optimum-cli")
    made = work / "made"
    for name in ("fp32", "fp16"):
        shutil.rmtree(made, ignore_errors=True)
        run(cli, "export", "onnx", "--model", work, "--task", "text-generation-with-past", "--dtype", name, made)
        keep(made, out / name, ["model.onnx"])
    keep(out / "fp32", out / "hub", [])
    (out / "hub" / "onnx").mkdir()
    move_weights(out / "fp32" / "model.onnx", out / "hub" / "onnx" / "model.onnx")
    keep(out / "fp32", out / "merged", [])
    merge(work, made)
    move_weights(made / "merged.onnx", out / "merged" / "decoder_model_merged.onnx")


def move_weights(source, out):
    """Puts the weights into a separate file, as exports of more than 2 GiB must."""
    import onnx

    onnx.save_model(onnx.load(source), out, save_as_external_data=True, location=out.name + "_data",
                    size_threshold=256)


def merge(work, made):
    """The merged decoder of older exports. Its command was removed, the function that it called was
    not."""
    from optimum.exporters.onnx import export
    from optimum.exporters.onnx.model_configs import LlamaOnnxConfig
    from optimum.onnx import merge_decoders
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(work).eval()
    parts = [made / "plain.onnx", made / "with_past.onnx"]
    for part, past in zip(parts, (False, True)):
        config = LlamaOnnxConfig(model.config, task="text-generation", use_past=True, use_past_in_inputs=past)
        export(model, config, part)
    merge_decoders(*parts, save_path=made / "merged.onnx")


def make_head(out):
    import numpy as np

    root = pathlib.Path(__file__).resolve().parent.parent.parent
    sys.path[:0] = [str(root / "onnx/train"), str(root / "onnx/export")]
    import graph
    import head

    config = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
              "intermediate_size": 64, "vocab_size": 96, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
              "rope_theta": 10000.0, "tie_word_embeddings": True, "eos_token_id": 0, "bos_token_id": 0}
    rng, taps, hidden, inner = np.random.default_rng(28), [0, 2], 32, 64
    shapes = {"taps.norm": (len(taps), hidden), "taps.weight": (hidden, len(taps) * hidden), "step.token_norm": (hidden,),
              "step.state_norm": (hidden,), "step.gate": (inner, 2 * hidden), "step.up": (inner, 2 * hidden),
              "step.down": (hidden, inner), "out.norm": (hidden,), "out.weight": (64, hidden)}
    drawn = {name: rng.standard_normal(shape).astype(np.float32) * (1 if "norm" in name else shape[-1] ** -0.5)
             for name, shape in shapes.items()}
    made = pathlib.Path(out) / "parts"
    made.mkdir(parents=True, exist_ok=True)
    head.kept(made / "head.npz", drawn, np.arange(0, 96, 1.5).astype(np.int32))
    (made / "card.json").write_text(json.dumps({"taps": taps}) + "\n")
    (out / "config.json").write_text(json.dumps(config) + "\n")
    graph.save(graph.build(graph.random_weights(config, 28), config), out / "model.onnx")
    head.export(argparse.Namespace(model=out, head=made))


def make_genai(work, out):
    made = work / "made"
    for name, precision, device, more in [
        ("fp32", "fp32", "cpu", []),
        ("fp16", "fp16", "cuda", []),  # the graph for a GPU; a CPU runs it as well
        ("int4", "int4", "cpu", []),
        ("last", "fp32", "cpu", ["--extra_options", "prune_lm_head=true"]),
    ]:
        shutil.rmtree(made, ignore_errors=True)
        run(sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", work, "-o", made, "-p", precision,
            "-e", device, "-c", work / "cache", *more)
        keep(made, out / name, ["model.onnx", "model.onnx.data"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["model", "optimum", "genai", "head", "reference"])
    parser.add_argument("work", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path, nargs="?")
    args = parser.parse_args()
    if args.what in ("model", "head"):
        {"model": make_model, "head": make_head}[args.what](args.work)
        return
    if args.out is None:
        parser.error("OUT is missing")
    {"optimum": make_optimum, "genai": make_genai, "reference": make_reference}[args.what](args.work, args.out)


if __name__ == "__main__":
    main()
