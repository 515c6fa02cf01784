"""The numerics contract of docs/numerics.md, tried on every fp32, fp16 and bf16 input of every op."""
