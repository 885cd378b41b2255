"""Tools shared by tests: tiny random models on disk, a scheduler written out by hand, transformers as the oracle.

`drive()` plans steps for a Worker without the engine: whole prompts, chunks, joins, scattered blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from paged_backend.sampling_params import SamplingParams
from paged_backend.sched.output import NewSequence, ScheduledSequence, SchedulerOutput

GREEDY = SamplingParams(temperature=0.0)

_SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Name: transformers' configuration class, and what differs from _SIZES.
TINY_MODELS: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaConfig", {}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama_biased": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "llama_rope_linear": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0}},
    ),
    "llama_rope_llama3": ("LlamaConfig", {"rope_parameters": _LLAMA3_ROPE, "head_dim": 32}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral_window": ("MistralConfig", {"sliding_window": 16}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
}


def make_tiny_model(name: str, directory: Path, **changed: object) -> Path:
    """Save a random model of `TINY_MODELS` to `directory`/`name` (float32 safetensors); returns that path.

    `changed` are further fields of its configuration.
    """
    import torch
    import transformers

    class_name, changes = TINY_MODELS[name]
    config = getattr(transformers, class_name)(**{**_SIZES, **changes, **changed})
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        # Fresh models have zero biases, unit norms and nearly flat logits: none of which would show a mistake.
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
            elif "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.15)
    path = directory / name
    model.save_pretrained(path)
    return path


# Tokens of more than one character, so that strings begin and end inside tokens.
_MERGES = [
    ("t", "h"),
    ("th", "e"),
    ("Ġ", "the"),
    ("i", "n"),
    ("a", "n"),
    ("an", "d"),
    ("1", "2"),
    ("Ġ", "a"),
    ("o", "r"),
]
_CHAT = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{{ tools | tojson }}"


def make_text_model(directory: Path) -> Path:
    """A tiny random Llama with a tokenizer: every byte a token, a few longer ones, `<s>` (1) in front, `</s>` (2) the
    end, and a chat template that writes `<s>` itself. Returns its directory."""
    import json

    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    path = make_tiny_model("llama", directory, vocab_size=288)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<pad>", "<s>", "</s>", *alphabet, *(left + right for left, right in _MERGES)]
    rust = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=_MERGES))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names[:3]])
    rust.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    rust.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": _CHAT}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def oracle_greedy(model, prompt: list[int], count: int, **options) -> list[int]:
    """`count` greedy tokens of a transformers model after `prompt`, end-of-sequence ignored; `options` of generate."""
    import torch

    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **options,
        )
    return output[0, len(prompt) :].tolist()


@dataclass
class _Driven:
    seq_id: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    announced: bool = False


def drive(
    worker,
    prompts: list[list[int]],
    count: int,
    *,
    params: list[SamplingParams] | None = None,
    seeds: list[int] | None = None,
    generated: list[list[int]] | None = None,
    budget: int = 10_000,
    join_every: int = 0,
    first_seq_id: int = 1,
) -> list[list[int]]:
    """Generate `count` tokens for each prompt on `worker`; returns the generated ids.

    Args:
        generated: tokens that each sequence has generated before, as one has that resumes; they count in `count`.
        budget: tokens a step; prompts beyond it are chunked.
        join_every: steps between one sequence's start and the next one's; 0: all start at once.
    """
    block_size, num_blocks = worker.resolved.block_size, worker.resolved.num_kv_blocks
    # Descending and strided, so that tables are scattered and a confusion of index and id shows.
    free = list(range(1, num_blocks + 1))[::2] + list(range(1, num_blocks + 1))[1::2]
    sequences = [
        _Driven(
            first_seq_id + i,
            list(prompt) + (generated[i] if generated else []),
            len(prompt),
            params[i] if params else GREEDY,
            seeds[i] if seeds else i,
        )
        for i, prompt in enumerate(prompts)
    ]
    step, removed = 0, []
    while True:
        live = [s for i, s in enumerate(sequences) if step >= i * join_every and not _done(s, count)]
        if not live and step >= join_every * len(sequences):
            break
        plan = SchedulerOutput(removed=removed)
        for sequence in live:
            _plan_sequence(plan, sequence, free, block_size, budget)
        output = worker.execute(plan)
        removed = []
        for seq_id, token in zip(output.seq_ids, output.token_ids, strict=True):
            sequence = sequences[seq_id - first_seq_id]
            sequence.tokens.append(token)
            if _done(sequence, count):
                removed.append(seq_id)
                free.extend(sequence.blocks)
        step += 1
    worker.execute(SchedulerOutput(removed=removed))
    return [s.tokens[s.num_prompt :] for s in sequences]


def _done(sequence: _Driven, count: int) -> bool:
    return len(sequence.tokens) - sequence.num_prompt >= count


def _plan_sequence(plan: SchedulerOutput, sequence: _Driven, free: list[int], block_size: int, budget: int) -> None:
    room = budget - plan.num_scheduled_tokens
    new_tokens = min(len(sequence.tokens) - sequence.computed, room)
    if new_tokens <= 0:
        return
    end = sequence.computed + new_tokens
    added = [free.pop() for _ in range(-(-end // block_size) - len(sequence.blocks))]
    sequence.blocks += added
    if not sequence.announced:
        sequence.announced = True
        plan.new.append(
            NewSequence(
                sequence.seq_id,
                list(sequence.tokens),
                sequence.num_prompt,
                list(sequence.blocks),
                sequence.params,
                sequence.seed,
            )
        )
    elif added:
        plan.new_block_ids[sequence.seq_id] = added
    samples = (sequence.seq_id,) if end == len(sequence.tokens) else ()
    plan.scheduled.append(ScheduledSequence(sequence.seq_id, sequence.computed, new_tokens, samples))
    plan.num_scheduled_tokens += new_tokens
    sequence.computed = end
