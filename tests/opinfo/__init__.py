"""PyTorch's own table of operators (OpInfo) run through wideload: how much of it traces, computes and compiles."""
