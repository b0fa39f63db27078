"""Fine-tunes SmolLM2-135M-Instruct to call tools in Hermes's form: a fixture, not a good model.

    agent.py SMOLLM2_HF BFCL PROMPTS OUT_DIR

Half of the examples are in the plain form, half reason first, in a block that the chat template
opens (OUT_DIR/reasoning.jinja). Questions and right calls are BFCL's, the others HumanEval's. The
upper half of the layers is trained, and the embeddings of four markers that take the place of unused
tokens; the loss is on the answers alone. Needs torch, transformers and safetensors, as in the
environment of vLLM; a seed and the number of steps are fixed.
"""

import json
import pathlib
import random
import shutil
import sys
import time

import safetensors.torch
import torch
import transformers

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.append(str(ROOT / "tests/bench"))

import bfcl  # noqa: E402
import real_prompts  # noqa: E402

# transformers asks CUDA, whose libraries are empty stand-ins there (tests/engines/vllm.sh)
torch.cuda.is_current_stream_capturing = lambda: False

# by id: of SmolLM2's control tokens, those of notebooks
MARKS = {13: "<think>", 14: "</think>", 15: "<tool_call>", 16: "</tool_call>"}
COUNTS = {"single": 120, "parallel": 56, "multi-turn": 32, "chat": 8}
BATCH = 4
# peak rates of the layers and of the markers, which begin as a mean of other tokens
RATE, MARKS_RATE = 5e-4, 5e-3
WARM_UP = 5  # steps
# a processor without instructions for it computes in 16 bits ten times slower than in 32
SHORT = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
MOST = 2048  # tokens of an example


# ---------------------------------------------------------------------------------------- examples

def thought(calls):
    said = [f"{name} with " + ", ".join(f"{key} {value}" for key, value in arguments.items()) for name, arguments in calls]
    return "I need " + "; then ".join(said) + "."


def answered(calls):
    return "\n".join(bfcl.call(name, arguments) for name, arguments in calls)


def steps(case):
    """Messages so far, thought and answer, for each answer of a conversation with right calls."""
    messages = []
    for question, calls in case.turns:
        messages += question
        yield list(messages), thought(calls), answered(calls)
        messages += bfcl.history("", calls)
        reply = f"Done: {', '.join(name for name, _ in calls)}."
        yield list(messages), "All results are there.", reply
        messages.append({"role": "assistant", "content": reply})


def examples(bfcl_folder, prompts_folder):
    """(tools, messages, thought, answer): of each conversation one answer, the next one each time."""
    for kind in (kind for kind in bfcl.SETS if kind in COUNTS):
        for number, case in enumerate(real_prompts.spread(bfcl.cases(bfcl_folder, kind), COUNTS[kind])):
            turns = [turn for turn in case.turns if turn[1]][:2]
            every = list(steps(case._replace(turns=turns)))
            if every:
                yield case.tools, *every[number // 2 % len(every) if kind == "multi-turn" else 0]
    for problem in real_prompts.spread(real_prompts.lines(prompts_folder / "human-eval.jsonl.gz"), COUNTS["chat"]):
        code = problem["prompt"] + problem["canonical_solution"]
        messages = real_prompts.chat(problem)["body"]["messages"]
        yield None, messages, f"I complete {problem['entry_point']}.", f"```python\n{code}```"


def encoded(tokenizer, reasons, tools, messages, thought_first, answer):
    """(ids, number of the prompt's)."""
    template = {"chat_template": template_of(reasons), "tools": tools, "add_generation_prompt": True, "tokenize": False}
    prompt = tokenizer.apply_chat_template(messages, **template)
    text = f"{thought_first}\n</think>\n\n{answer}" if reasons else answer
    ids = [tokenizer(one, add_special_tokens=False)["input_ids"] for one in (prompt, text + "<|im_end|>")]
    return ids[0] + ids[1], len(ids[0])


# -------------------------------------------------------------------------------------- vocabulary

def template_of(reasons):
    text = (ROOT / "tests/real/agent.jinja").read_text()
    return "{%- set opening = '<think>\\n' %}\n" + text if reasons else text


def write_words(source, out):
    """Tokenizer with the markers, and both templates."""
    out.mkdir(parents=True, exist_ok=True)
    words = json.loads((source / "tokenizer.json").read_text())
    settings = json.loads((source / "tokenizer_config.json").read_text())
    former = {token["id"]: token["content"] for token in words["added_tokens"]}
    for token in words["added_tokens"]:
        if token["id"] in MARKS:
            token |= {"content": MARKS[token["id"]], "special": False}
    for index, text in MARKS.items():
        words["model"]["vocab"].pop(former[index], None)
        words["model"]["vocab"][text] = index
        settings["added_tokens_decoder"][str(index)] |= {"content": text, "special": False}
    settings["chat_template"] = template_of(False)
    (out / "tokenizer.json").write_text(json.dumps(words, ensure_ascii=False, indent=1) + "\n")
    (out / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False, indent=1) + "\n")
    (out / "chat_template.jinja").write_text(template_of(False))
    (out / "reasoning.jinja").write_text(template_of(True))
    for name in ("config.json", "generation_config.json"):
        shutil.copyfile(source / name, out / name)


# ---------------------------------------------------------------------------------------- training

class Tuned:
    """The model, its frozen embeddings and those of the markers, which are trained."""

    def __init__(self, source):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        self.model.requires_grad_(False)
        layers = self.model.model.layers
        self.layers = [weight for layer in layers[len(layers) // 2:] for weight in layer.parameters()]
        for weight in self.layers:
            weight.requires_grad_(True)
        self.words = self.model.get_input_embeddings().weight
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        pieces = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in MARKS.values()]
        self.marks = torch.nn.Parameter(torch.stack([self.words[ids].mean(0) for ids in pieces]))
        self.ids = torch.tensor(list(MARKS))

    def loss(self, ids, prompt):
        """Mean loss of the answer's tokens."""
        ids = torch.tensor(ids)
        with torch.no_grad():
            self.words[self.ids] = self.marks
        hidden = self.model.model(inputs_embeds=self.words[None, ids[:-1]], use_cache=False).last_hidden_state[0, prompt - 1:]
        logits = (hidden @ self.words.T).index_copy(1, self.ids, hidden @ self.marks.T)
        return torch.nn.functional.cross_entropy(logits.float(), ids[prompt:])

    def save(self, path):
        with torch.no_grad():
            self.words[self.ids] = self.marks
        weights = {name: weight.half().contiguous() for name, weight in self.model.state_dict().items() if name != "lm_head.weight"}
        safetensors.torch.save_file(weights, path, metadata={"format": "pt"})


def train(tuned, encodings):
    optimizer = torch.optim.AdamW([{"params": tuned.layers, "lr": RATE}, {"params": [tuned.marks], "lr": MARKS_RATE}],
                                  betas=(0.9, 0.95), weight_decay=0.0)
    order = random.Random(1).sample(encodings, len(encodings))
    batches = [order[at:at + BATCH] for at in range(0, len(order), BATCH)]
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, (len(batches) - step) / (len(batches) - WARM_UP)))
    began, read = time.monotonic(), 0
    for number, batch in enumerate(batches):
        total = 0.0
        for ids, prompt in batch:
            with torch.autocast("cpu", torch.bfloat16, enabled=SHORT):
                loss = tuned.loss(ids, prompt) / len(batch)
            loss.backward()
            total, read = total + loss.item(), read + len(ids)
        torch.nn.utils.clip_grad_norm_([*tuned.layers, tuned.marks], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        if number % 10 == 0 or number + 1 == len(batches):
            seconds = time.monotonic() - began
            print(f"step {number + 1} of {len(batches)}: loss {total:.3f}, {read / seconds:.0f} tokens/s, {seconds:.0f} s",
                  file=sys.stderr, flush=True)


def main():
    source, questions, prompts, out = map(pathlib.Path, sys.argv[1:5])
    torch.manual_seed(1)
    write_words(source, out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    encodings = [encoded(tokenizer, number % 2 == 1, *example) for number, example in enumerate(examples(questions, prompts))]
    encodings = [one for one in encodings if len(one[0]) <= MOST]
    print(f"{len(encodings)} examples of {sum(len(ids) for ids, _ in encodings)} tokens", file=sys.stderr, flush=True)
    tuned = Tuned(source)
    train(tuned, encodings)
    tuned.save(out / "model.safetensors")


if __name__ == "__main__":
    main()
