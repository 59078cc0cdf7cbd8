"""llama.cpp on the weights of a Hugging Face folder of a Llama, for `lookonce bench cpu`.

`python -m benchmarks.llama_cpp_peer FOLDER TYPE PROMPT SHORT_PROMPT STEPS TURNS THREADS BATCH...`
writes the weights as GGUF (gguf), loads them (llama_cpp) and prints tokens/s as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.report import median

GGUF_TYPES = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0"}
NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
OTHERS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def main(arguments: Sequence[str]) -> None:
    folder, kind, *numbers = arguments
    prompt, short, steps, turns, threads, *batches = map(int, numbers)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.gguf"
        write_gguf(Path(folder), path, GGUF_TYPES[kind])
        peer = _Peer(path, threads, prompt, max(batches), short + steps + 1)
        peer.prefill(prompt)  # buffers grow
        prefill = median([peer.prefill(prompt) for _ in range(turns)])
        decode = {
            batch: median([peer.decode(batch, short, steps) for _ in range(turns)])
            for batch in batches
        }
    print(json.dumps({"prefill": prefill, "decode": decode}))


def write_gguf(folder: Path, path: Path, kind: str) -> None:
    """Write a Llama's weights without a tokenizer; matrices as `kind`, norms in float32."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    quantized = gguf.GGMLQuantizationType[kind]
    for name, weight in load_file(folder / "model.safetensors").items():
        values = weight.float()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _neighbours(values, heads if "q_proj" in name else kv_heads)
        dtype = quantized if weight.dim() > 1 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(values.numpy(), dtype)
        writer.add_tensor(_gguf_name(name), data, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _neighbours(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head such that neighbours are rotated together, as GGUF has them."""
    rows, width = weight.shape
    halves = weight.view(heads, 2, rows // heads // 2, width)
    return halves.transpose(1, 2).reshape(rows, width).contiguous()


def _gguf_name(name: str) -> str:
    if name in OTHERS:
        return OTHERS[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}"


class _Peer:
    """Sequences of random tokens in llama.cpp's own cache."""

    def __init__(self, path: Path, threads: int, prompt: int, batch: int, length: int) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        if not self._model:
            raise RuntimeError("llama.cpp does not load the weights")
        context = llama_cpp.llama_context_default_params()
        context.n_ctx = max(prompt + 64, batch * (length + 64))
        context.n_batch = context.n_ubatch = 512
        context.n_seq_max, context.kv_unified = batch, True
        context.n_threads = context.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(max(512, batch), 0, 1)
        self._random = np.random.default_rng(0)

    def prefill(self, prompt: int) -> float:
        """Prompt tokens per second until the last one's logits are there."""
        self._clear()
        tokens = self._random.integers(0, self._vocab, prompt).tolist()
        started = time.perf_counter()
        self._put(0, tokens)
        self._best(-1)
        return prompt / (time.perf_counter() - started)

    def decode(self, batch: int, prompt: int, steps: int) -> float:
        """Tokens per second of all sequences."""
        self._clear()
        for sequence in range(batch):
            tokens = self._random.integers(0, self._vocab, prompt).tolist()
            self._put(sequence, tokens)
        last = [1] * batch
        started = time.perf_counter()
        for step in range(steps):
            self._fill([(token, prompt + step, row, True) for row, token in enumerate(last)])
            last = [self._best(row) for row in range(batch)]
        return batch * steps / (time.perf_counter() - started)

    def _clear(self) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

    def _put(self, sequence: int, tokens: list[int]) -> None:
        for start in range(0, len(tokens), 512):
            part = tokens[start : start + 512]
            rows = [(token, start + i, sequence, False) for i, token in enumerate(part)]
            rows[-1] = (*rows[-1][:3], True)
            self._fill(rows)

    def _fill(self, rows: list[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = wanted
        if self._lib.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama.cpp does not compute a step")

    def _best(self, row: int) -> int:
        logits = self._lib.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
