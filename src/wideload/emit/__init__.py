"""Plans in, CUDA C++ out: text only, no driver."""
