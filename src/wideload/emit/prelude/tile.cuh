// A tile of an operand that runs along other lines than the outputs, on its way through shared memory: `columns` along the outputs'
// fast dim, each of `lines` elements along its own, in chunks of 16 bytes (N elements). Chunk c of a column lies at place c ^ turn,
// within its group of eight (the 32 banks), where `turn` is the reversed low bits of the column's number, counted in the accesses of
// `width` elements in which the outputs are written. No bank is met twice:
// - Eight threads, a quarter of a warp, store neighbouring chunks of one group: eight places, whatever the turn.
// - A warp reads one column of each of eight neighbouring accesses, at four places along the lines: eight turns. Their bits are
//   reversed for threads that read 8 or 16 bytes and hence meet several chunks at once, only four or two accesses at a time: turns
//   that differ in the bits in which those chunks do not.

DEVICE int tile_turn(int access) { return __brev(access) >> 29; }

template <int chunks> DEVICE int tile_place(int column, int chunk, int turn) { return chunks >= 8 ? column * chunks + (chunk ^ turn) : (column * chunks + chunk) ^ turn; }

// The access that thread i of a tile's output computes: where its first column and its first line lie in the tile. A warp's are
// eight neighbouring ones of four neighbouring groups of `depth` lines: 128 bytes of each line where an access has 16.
template <int columns, int width> DEVICE int tile_column(int i) { return (i / 32 % (columns / width / 8) * 8 + i / 4 % 8) * width; }

template <int columns, int width, int depth> DEVICE int tile_line(int i) { return (i / 32 / (columns / width / 8) * 4 + i % 4) * depth; }

// The chunks of a tile that a thread loads, every threads-th of the tile; all are inside the operand.
template <int columns, int lines, int threads, class T, int N, int K, class I, class U> DEVICE void load_lines(vec<T, N> (&v)[K], const T* p, I column0, I line0, U stride)
{
    const int chunks = lines / N, total = columns * chunks;
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const int i = threadIdx.x + k * threads;
        if (total % threads == 0 || i < total) v[k] = load_vector<N>(p + ((U)(column0 + i / chunks) * stride + (U)(line0 + i % chunks * N)));
    }
}

template <int columns, int lines, int threads, class T, int N, int K, class I, class U> DEVICE void load_lines_realigned(vec<T, N> (&v)[K], const T* p, I column0, I line0, U stride, const T* begin, const T* end)
{
    const int chunks = lines / N, total = columns * chunks;
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const int i = threadIdx.x + k * threads;
        if (total % threads == 0 || i < total) v[k] = load_realigned<N>(p + ((U)(column0 + i / chunks) * stride + (U)(line0 + i % chunks * N)), begin, end);
    }
}

// What load_lines loaded, to shared memory.
template <int columns, int lines, int threads, int width, class T, int N, int K> DEVICE void store_lines(vec<T, N>* tile, const vec<T, N> (&v)[K])
{
    const int chunks = lines / N, total = columns * chunks;
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const int i = threadIdx.x + k * threads;
        if (total % threads == 0 || i < total) tile[tile_place<chunks>(i / chunks, i % chunks, tile_turn(i / chunks / width))] = v[k];
    }
}

// The elements i, i + 1, ... of an operand of n, as far as they are in it; i may be negative. Zeros elsewhere.
template <int N, class T> DEVICE vec<T, N> load_within(const T* p, long long i, long long n)
{
    vec<T, N> v = {};
#pragma unroll
    for (int k = 0; k < N; ++k)
        if (i + k >= 0 && i + k < n) v.set(k, p[i + k]);
    return v;
}

// Both, of a tile that is partly outside the operand's size0 columns of size1 elements: whole chunks first, then those with an end in them.
template <int columns, int lines, int threads, int width, class T, int N, int K, class I, class U>
DEVICE void fill_lines(vec<T, N>* tile, vec<T, N> (&v)[K], const T* p, I column0, I line0, I size0, I size1, U stride, const T* begin, const T* end)
{
    const int chunks = lines / N, total = columns * chunks;
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const int i = threadIdx.x + k * threads;
        const I column = column0 + i / chunks, line = line0 + i % chunks * N;
        if (i < total && column >= 0 && column < size0 && line + N <= size1) v[k] = load_realigned<N>(p + ((U)column * stride + (U)line), begin, end);
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const int i = threadIdx.x + k * threads;
        const I column = column0 + i / chunks, line = line0 + i % chunks * N;
        if (i < total && column >= 0 && column < size0 && line + N <= size1) tile[tile_place<chunks>(i / chunks, i % chunks, tile_turn(i / chunks / width))] = v[k];
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < total; i += threads) {
        const I column = column0 + i / chunks, line = line0 + i % chunks * N;
        if (column >= 0 && column < size0 && line < size1 && line + N > size1)
            tile[tile_place<chunks>(i / chunks, i % chunks, tile_turn(i / chunks / width))] = load_within<N>(p + (U)column * stride, line, size1);
    }
}

// The elements of `depth` neighbouring lines at one column of a tile, in one access.
template <int lines, int width, int depth, class T, int N> DEVICE vec<T, depth> load_turned(const vec<T, N>* tile, int column, int line, int turn)
{
    return reinterpret_cast<const vec<T, depth>*>(tile + tile_place<lines / N>(column, line / N, turn))[line % N / depth];
}

// As load_within, of elements that are `stride` apart.
template <int N, class T> DEVICE vec<T, N> load_apart(const T* p, long long i, long long n, long long stride)
{
    vec<T, N> v = {};
#pragma unroll
    for (int k = 0; k < N; ++k)
        if (i + k >= 0 && i + k < n) v.set(k, p[(i + k) * stride]);
    return v;
}
