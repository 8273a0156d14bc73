#!/usr/bin/env bash
# GSM8K, Qwen3-4B, GRPO with DPPO, one node of 8 GPUs: FSDP2 trains, vLLM generates.
#
#   bash run_scripts/gsm8k_qwen3_4b_fsdp_vllm.sh                         # from nothing to a run
#   bash run_scripts/gsm8k_qwen3_4b_fsdp_vllm.sh trainer.total_epochs=1  # arguments go to Hydra
#   bash run_scripts/gsm8k_qwen3_4b_fsdp_vllm.sh --cfg job               # print the config, start nothing
#
# Environment, all optional:
#   GSM8K_DIR        where train.parquet and test.parquet are, or will be made      (data/gsm8k)
#   GSM8K_JSONL_DIR  make them from train.jsonl and test.jsonl in this folder       (the Hugging Face hub)
#   MODEL_PATH       the model: hub name or local folder                            (Qwen/Qwen3-4B)
#   PYTHON           the interpreter that has verl, vllm and verl-dppo              (python)
#
# Relative paths in the environment are relative to where you are; those in arguments to the repository's root.
set -euo pipefail

refuse() {
  echo "$(basename "$0"): $1" >&2
  exit 2
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python}"
recipe=gsm8k_qwen3_4b

# --- inputs ---------------------------------------------------------------------------------------------------------
[[ -f "$root/trainer_configs/recipe/$recipe.yaml" ]] ||
  refuse "$root/trainer_configs/recipe/$recipe.yaml is missing; run this script from a complete checkout"
command -v "$python" >/dev/null || refuse "no interpreter '$python'; activate your environment or set PYTHON"

need=(verl verl_dppo)
# Printing the config needs no rollout engine.
[[ " $* " == *" --cfg "* || " $* " == *" --help "* ]] || need+=(vllm)
for package in "${need[@]}"; do
  "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$package') is None)" ||
    refuse "'$python' has no package '$package'; run: pip install -e '$root[vllm]'"
done

if [[ "${MODEL_PATH:-}" == [./~]* && ! -f "$MODEL_PATH/config.json" ]]; then
  refuse "MODEL_PATH=$MODEL_PATH has no config.json; give a model folder, or a hub name such as Qwen/Qwen3-4B"
fi
if [[ -n "${GSM8K_JSONL_DIR:-}" && ! -d "$GSM8K_JSONL_DIR" ]]; then
  refuse "GSM8K_JSONL_DIR=$GSM8K_JSONL_DIR is no folder; it must hold train.jsonl and test.jsonl"
fi

# --- data -----------------------------------------------------------------------------------------------------------
data="$(realpath -m "${GSM8K_DIR:-$root/data/gsm8k}")"
model="${MODEL_PATH:-Qwen/Qwen3-4B}"
[[ -d "$model" ]] && model="$(realpath "$model")"

if [[ ! -f "$data/train.parquet" || ! -f "$data/test.parquet" ]]; then
  source_of_data=(--hub)
  [[ -n "${GSM8K_JSONL_DIR:-}" ]] && source_of_data=(--jsonl "$GSM8K_JSONL_DIR")
  "$python" -c 'import sys; from verl_dppo.cli import main; sys.exit(main())' \
    gsm8k "${source_of_data[@]}" --out "$data" >&2
fi

# --- run ------------------------------------------------------------------------------------------------------------
# Paths are given as settings, not left to the environment: a Ray cluster that is already up does not see this shell's.
cd "$root"
exec "$python" -m verl.trainer.main_ppo \
  --config-dir "$root/trainer_configs" \
  algorithm=dppo \
  +recipe="$recipe" \
  data.train_files="'$data/train.parquet'" \
  data.val_files="'$data/test.parquet'" \
  actor_rollout_ref.model.path="'$model'" \
  "$@"
