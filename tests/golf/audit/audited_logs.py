"""A training log as the challenge's script writes it."""

BASELINE = """\
logs/run.txt
import os
print("final_int6_sliding_window_exact val_loss:0.10000000 val_bpb:0.10000000")
# Total submission size int8+zlib: 1 bytes
====================================================================================================
Running Python 3.11.10 (main) [GCC 11.4.0]
Running PyTorch 2.8.0+cu128
====================================================================================================
val_bpb:enabled tokenizer_kind=sentencepiece tokenizer_path=./data/tokenizers/fineweb_1024_bpe.model
train_loader:dataset:fineweb10B_sp1024 train_shards:80
val_loader:shards pattern=./data/datasets/fineweb10B_sp1024/fineweb_val_*.bin tokens:62021632
model_params:17059912
world_size:8 grad_accum_steps:1
train_batch_tokens:524288 train_seq_len:1024 iterations:20000 warmup_steps:20 max_wallclock_seconds:600.000
seed:{seed}
warmup_step:20/20
step:0/20000 val_loss:6.9357 val_bpb:4.1077 train_time:0ms step_avg:0.02ms
step:13600/20000 train_loss:2.0510 train_time:592121ms step_avg:43.54ms
step:13780/20000 val_loss:2.0606 val_bpb:1.2172 train_time:{train_ms}ms step_avg:43.54ms
stopping_early: wallclock_cap train_time:{train_ms}ms step:13780/20000
peak memory allocated: 10184 MiB reserved: 10200 MiB
Serialized model: 67224983 bytes
Code size: {code} bytes
Total submission size: 67272625 bytes
Serialized model int8+zlib: {model} bytes (payload:17178912 raw_torch:17224025 payload_ratio:3.91x)
Total submission size int8+zlib: {total} bytes
final_int8_zlib_roundtrip val_loss:2.0727 val_bpb:1.2276 eval_time:1401ms
final_int8_zlib_roundtrip_exact val_loss:{loss:.8f} val_bpb:{bpb:.8f}
"""

BYTES_PER_TOKEN = 151_078_000 / 62_021_632
LN2 = 0.6931471805599453


def baseline(**changes: object) -> str:
    """Return the baseline's log; bits per byte follow from the loss unless `changes` has them."""
    values: dict[str, object] = {
        "seed": 1337,
        "train_ms": 600038,
        "code": 47642,
        "model": 15815847,
        "loss": 2.07269931,
        **changes,
    }
    values.setdefault("total", int(str(values["code"])) + int(str(values["model"])))
    values.setdefault("bpb", float(str(values["loss"])) / LN2 / BYTES_PER_TOKEN)
    return BASELINE.format(**values)
