"""Trains the byte-level BPE tokenizers on the corpus.

The pre-tokenizer is GPT-2's regular expression, because llama.cpp knows it by the name `gpt-2` and
so the GGUF export tokenizes as the ONNX one does. Two vocabularies: `same` (8,192, for target and
draft-same) and `other` (6,144, from a sample weighted towards prose, so that sizes and merges
differ: the honest test for a drafter with another vocabulary).

    tokenizer.py CORPUS_DIR same|other OUT_DIR
"""

import json
import pathlib
import random
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIALS = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|rewrite|>"]
KINDS = {  # vocabulary size, megabytes of each pool
    "same": (8192, {"code": 24, "prose": 8, "chat": 3}),
    "other": (6144, {"code": 7, "prose": 12, "chat": 6}),
}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] }}"
    "{{ '<|endoftext|>' if message['role'] == 'assistant' else '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def sample(corpus, sizes):
    for kind, megabytes in sizes.items():
        left = megabytes * 1_000_000
        lines = open(corpus / "train" / f"{kind}.jsonl").readlines()
        random.Random(7).shuffle(lines)
        for line in lines:
            text = json.loads(line)["text"][:20_000]
            for special in SPECIALS:
                text = text.replace(special, "")
            yield text
            left -= len(text)
            if left < 0:
                break


def main():
    corpus, kind, out = pathlib.Path(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
    size, sizes = KINDS[kind]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.train_from_iterator(sample(corpus, sizes), trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIALS, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    assert tokenizer.get_vocab_size() == size
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE + "\n")
    (out / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False, "add_prefix_space": False,
        "bos_token": SPECIALS[0], "eos_token": SPECIALS[0], "pad_token": SPECIALS[0],
        "unk_token": None, "clean_up_tokenization_spaces": False,
        "model_max_length": 2048, "chat_template": CHAT_TEMPLATE,
        "added_tokens_decoder": {str(i): {"content": s, "special": True, "normalized": False,
                                          "lstrip": False, "rstrip": False, "single_word": False}
                                 for i, s in enumerate(SPECIALS)},
    }, indent=1) + "\n")


if __name__ == "__main__":
    main()
