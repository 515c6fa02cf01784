// A tile of an operand that runs along other lines than the outputs, on its way through shared memory: `columns` along the outputs'
// fast dim, each of `lines` elements along its own, in chunks of 16 bytes (N elements). Chunk c of a column lies at place c ^ turn,
// within its group of eight (the 32 banks), where `turn` is the reversed low bits of the column's number, counted in the accesses of
// `width` elements in which the outputs are written. No bank is met twice:
// - Eight threads, a quarter of a warp, store neighbouring chunks of one group: eight places, whatever the turn.
// - A warp reads one column of each of eight neighbouring accesses, at four places along the lines: eight turns. Their bits are
//   reversed for threads that read 8 or 16 bytes and hence meet several chunks at once, only four or two accesses at a time: turns
//   that differ in the bits in which those chunks do not.

DEVICE unsigned tile_turn(unsigned access) { return __brev(access) >> 29; }

template <int chunks> DEVICE unsigned tile_place(unsigned column, unsigned chunk, unsigned turn) { return chunks >= 8 ? column * chunks + (chunk ^ turn) : (column * chunks + chunk) ^ turn; }

// The access that thread i of a tile's output computes: where its first column and its first line lie in the tile. A warp's are
// eight neighbouring ones of four neighbouring groups of `depth` lines: 128 bytes of each line where an access has 16.
template <int columns, int width> DEVICE unsigned tile_column(unsigned i) { return (i / 32 % (columns / width / 8) * 8 + i / 4 % 8) * width; }

template <int columns, int width, int depth> DEVICE unsigned tile_line(unsigned i) { return (i / 32 / (columns / width / 8) * 4 + i % 4) * depth; }

// As load_within, of elements that are `stride` apart.
template <int N, class T> DEVICE vec<T, N> load_apart(const T* p, long long i, long long n, long long stride)
{
    vec<T, N> v = {};
#pragma unroll
    for (int k = 0; k < N; ++k)
        if (i + k >= 0 && i + k < n) v.set(k, p[(i + k) * stride]);
    return v;
}

// Every access of a tile goes through one of these.
template <class V> DEVICE V read_tile(const V* p) { return *p; }

template <class V> DEVICE void write_tile(V* p, const V& v) { *p = v; }

// The chunks of a tile that a thread loads, every threads-th; a thread that has none left loads the last one again. All are inside the
// operand, and so are the aligned accesses that they lie in.
template <int columns, int lines, int threads, bool is_aligned, class T, int N, int K, class I, class U>
DEVICE void load_lines(vec<T, N> (&v)[K], const T* p, U stride, I column0, I line0)
{
    const unsigned chunks = lines / N, total = columns * chunks;
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const unsigned own = threadIdx.x + k * threads, i = (k + 1) * threads <= total || own < total ? own : total - 1;
        const T* at = p + ((U)(column0 + i / chunks) * stride + (U)(line0 + i % chunks * N));
        v[k] = is_aligned ? load_vector<N>(at) : load_shifted<N>(at);
    }
}

// The same, of an operand of size0 columns of size1 elements in which no chunk is cut: instead of one outside, the first is loaded.
template <int columns, int lines, int threads, class T, int N, int K, class I, class U>
DEVICE void load_lines_inside(vec<T, N> (&v)[K], const T* p, U stride, I column0, I line0, I size0, I size1)
{
    const unsigned chunks = lines / N;
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const unsigned i = threadIdx.x + k * threads;
        const I column = column0 + (I)(i / chunks), line = line0 + (I)(i % chunks * N);
        v[k] = load_vector<N>(p + (column < size0 && line < size1 ? (U)column * stride + (U)line : 0));
    }
}

// What load_lines loaded, to shared memory.
template <int columns, int lines, int threads, int width, class T, int N, int K> DEVICE void store_lines(vec<T, N>* tile, const vec<T, N> (&v)[K])
{
    const unsigned chunks = lines / N, total = columns * chunks;
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const unsigned i = threadIdx.x + k * threads;
        if ((k + 1) * threads <= total || i < total) write_tile(tile + tile_place<chunks>(i / chunks, i % chunks, tile_turn(i / chunks / width)), v[k]);
    }
}

// Both, of a tile that is partly outside the operand's size0 columns of size1 elements: first the chunks that can be loaded whole,
// then the others, element by element.
template <int columns, int lines, int threads, int width, bool is_aligned, class T, int N, int K, class I, class U>
DEVICE void fill_lines(vec<T, N>* tile, vec<T, N> (&v)[K], const T* p, U stride, I column0, I line0, I size0, I size1, const T* begin, const T* end)
{
    const unsigned chunks = lines / N, total = columns * chunks;
    bool is_whole[K];
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const unsigned i = threadIdx.x + k * threads;
        const I column = column0 + (I)(i / chunks), line = line0 + (I)(i % chunks * N);
        const T* at = p + ((U)column * stride + (U)line);
        is_whole[k] = i < total && column >= 0 && column < size0 && line + N <= size1;
        if (!is_aligned) is_whole[k] = is_whole[k] && at - begin >= N && end - at >= 2 * N;
        if (is_whole[k]) v[k] = is_aligned ? load_vector<N>(at) : load_shifted<N>(at);
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const unsigned i = threadIdx.x + k * threads;
        if (is_whole[k]) write_tile(tile + tile_place<chunks>(i / chunks, i % chunks, tile_turn(i / chunks / width)), v[k]);
    }
#pragma unroll 1
    for (int k = 0; k < K; ++k) {
        const unsigned i = threadIdx.x + k * threads;
        const I column = column0 + (I)(i / chunks), line = line0 + (I)(i % chunks * N);
        const T* at = p + ((U)column * stride + (U)line);
        const bool is_inside = i < total && column >= 0 && column < size0 && line < size1;
        if (is_inside && (line + N > size1 || (!is_aligned && (at - begin < N || end - at < 2 * N))))
            write_tile(tile + tile_place<chunks>(i / chunks, i % chunks, tile_turn(i / chunks / width)), load_within<N>(p + (U)column * stride, line, size1));
    }
}

// The elements of `depth` neighbouring lines at one column of a tile, in one access.
template <int lines, int width, int depth, class T, int N> DEVICE vec<T, depth> load_turned(const vec<T, N>* tile, unsigned column, unsigned line, unsigned turn)
{
    return read_tile(reinterpret_cast<const vec<T, depth>*>(tile + tile_place<lines / N>(column, line / N, turn)) + line % N / depth);
}

// One line of a tile from any column on: an access of its own for each element. They lie in two accesses of the output as a rule, whose
// turns differ, but within each a column is a fixed step from the last.
template <int lines, int width, class T, int N> DEVICE void gather_line(vec<T, 1> (&r)[width], const vec<T, N>* tile, unsigned column, unsigned line)
{
    const unsigned first = column / width, skip = column % width, chunks = lines / N;
    const unsigned low = tile_turn(first), high = tile_turn(first + 1);
    if (chunks >= 8) {
        // As they are, or the choice between the two addresses would move to before their multiplications, and these to each element.
        const unsigned low_at = settled(tile_place<chunks>(column, line / N, low) * 16 + line % N * sizeof(T));
        const unsigned high_at = settled(tile_place<chunks>(column, line / N, high) * 16 + line % N * sizeof(T));
#pragma unroll
        for (int e = 0; e < width; ++e) {
            const char* at = reinterpret_cast<const char*>(tile) + (skip < width - e ? low_at : high_at) + e * lines * sizeof(T);
            r[e] = read_tile(reinterpret_cast<const vec<T, 1>*>(at));
        }
    } else {
#pragma unroll
        for (int e = 0; e < width; ++e) r[e] = load_turned<lines, width, 1>(tile, column + e, line, skip < width - e ? low : high);
    }
}
