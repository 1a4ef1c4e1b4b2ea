"""What to say about a flag that no command has: its name here, or a name spelled alike. Imports no torch.

docs/migrating.md describes the flags of vLLM and llama.cpp in full; a test compares both lists.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches

_ALWAYS_ON = "leave it out: it is always on"
_STORED = "leave it out: the checkpoint's files decide"
_REQUEST = "requests set it"
_ROPE = "write rope_parameters into the checkpoint's config.json"
_PROXY = "put a proxy in front of the service"
_NOT_THERE = "leave it out: the engine has nothing like it"

# Flags of vLLM's and llama.cpp's servers: a flag of ours, or a remedy in words.
OTHER_NAMES: Mapping[str, str] = {
    "--tensor-parallel-size": "--tensor-parallel",
    "-tp": "--tensor-parallel",
    "--data-parallel-size": "start replicas with Ray Serve",
    "--pipeline-parallel-size": _NOT_THERE,
    "-pp": _NOT_THERE,
    "--enable-expert-parallel": _NOT_THERE,
    "--max-num-seqs": "--max-batch",
    "--max-num-batched-tokens": "--prefill-chunk",
    "--enable-chunked-prefill": _ALWAYS_ON,
    "--gpu-memory-utilization": "--memory-utilization",
    "--num-gpu-blocks-override": "--num-blocks",
    "--quantization": _STORED,
    "--load-format": _STORED,
    "--kv-cache-dtype": "--kv-dtype",
    "--enable-prefix-caching": _ALWAYS_ON,
    "--no-enable-prefix-caching": "--no-prefix-cache",
    "--swap-space": "--offload-gb",
    "--kv-offloading-size": "--offload-gb",
    "--cpu-offload-gb": _NOT_THERE,
    "--enforce-eager": "--compile off",
    "--compilation-config": "--compile",
    "--cudagraph-capture-sizes": "--batch-sizes",
    "--speculative-config": "--mtp-step",
    "--enable-lora": "--lora",
    "--lora-modules": "--lora",
    "--hf-overrides": "write it into the checkpoint's config.json",
    "--rope-scaling": _ROPE,
    "--tokenizer": _STORED,
    "--trust-remote-code": "leave it out: the engine runs no code of a checkpoint",
    "--download-dir": "set HF_HOME",
    "--revision": "download it with `hf download` and pass the directory",
    "--generation-config": _ALWAYS_ON,
    "--enable-auto-tool-choice": _ALWAYS_ON,
    "--tool-call-parser": "leave it out: the chat template decides",
    "--reasoning-parser": "leave it out: the chat template decides",
    "--structured-outputs-config": _ALWAYS_ON,
    "--scheduling-policy": _REQUEST,
    "--async-scheduling": _ALWAYS_ON,
    "--limit-mm-per-prompt": "--max-images",
    "--mm-processor-kwargs": "--max-pixels",
    "--allowed-media-domains": "--allow-media-urls",
    "--allowed-local-media-path": "--media-root",
    "--max-logprobs": _NOT_THERE,
    "--enable-log-requests": _ALWAYS_ON,
    "--disable-log-requests": "--log-level warning",
    "--disable-log-stats": "leave it out: statistics are at /metrics only",
    "--uvicorn-log-level": "--log-level",
    "--ssl-keyfile": _PROXY,
    "--ssl-certfile": _PROXY,
    "--root-path": _PROXY,
    "-m": "--model",
    "-hf": "--model",
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "-ngl": "--device",
    "--n-gpu-layers": "--device",
    "-ts": "--tensor-parallel",
    "-sm": "--tensor-parallel",
    "-t": "--num-threads",
    "--threads": "--num-threads",
    "-b": "--prefill-chunk",
    "-ub": "--prefill-chunk",
    "-np": "--max-batch",
    "--parallel": "--max-batch",
    "-cb": _ALWAYS_ON,
    "--cont-batching": _ALWAYS_ON,
    "-fa": _ALWAYS_ON,
    "--flash-attn": _ALWAYS_ON,
    "-ctk": "--kv-dtype",
    "-ctv": "--kv-dtype",
    "--api-key": "write the key into a file for --api-key-file",
    "-a": "--served-model-name",
    "--alias": "--served-model-name",
    "--jinja": _ALWAYS_ON,
    "--chat-template-file": "--chat-template",
    "--log-verbosity": "--log-level",
    "--reasoning-format": _ALWAYS_ON,
    "--grammar-file": _REQUEST,
    "--json-schema-file": _REQUEST,
    "--mmproj": "--max-images",
    "--rope-scale": _ROPE,
    "--yarn-orig-ctx": _ROPE,
    "-md": _NOT_THERE,
    "--model-draft": _NOT_THERE,
    "--draft-max": "--mtp-step",
    "--spec-type": "--mtp-step",
    "--cache-prompt": _ALWAYS_ON,
    "--cache-reuse": _ALWAYS_ON,
    "--mlock": _NOT_THERE,
    "--no-mmap": _NOT_THERE,
    "--metrics": _ALWAYS_ON,
    "--slots": _ALWAYS_ON,
    "--ssl-key-file": _PROXY,
    "--ssl-cert-file": _PROXY,
    "-to": "--write-timeout-s",
    "--timeout": "--write-timeout-s",
    "--temp": "--temperature",
    "--repeat-penalty": "--repetition-penalty",
    "-n": "--max-tokens",
    "-p": "--prompt",
    "-f": "--prompt-file",
}


def remedy_for(word: str, known: Collection[str]) -> str | None:
    """Return what to do about an unknown word of the command line, if that is known.

    known: the flags of the command. A path is taken for the model, which other servers take without a flag.
    """
    flag, _, _ = word.partition("=")
    if not flag.startswith("-"):
        is_path = "/" in word or word.endswith(".gguf")
        if is_path and "--model" in known:
            return f"pass the model as --model {word}"
        return "put quotes around a value of several words"
    other = OTHER_NAMES.get(flag)
    if other is not None and not other.startswith("-"):
        return other
    if other is not None:
        return f"{flag} is {other} here" if other.split()[0] in known else None
    similar = get_close_matches(flag, [one for one in known if one.startswith("--")], n=1, cutoff=0.8)
    return f"did you mean {similar[0]}?" if similar else None
