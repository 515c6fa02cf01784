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

// As load_vector, of memory that nothing has written before in this kernel; with fetches_block the L2 gets all 256 bytes of memory in which
// the chunk is, the rest of which the next tile reads. The L2 is to keep it longer than what stores and other operands leave there: of the
// wall on an H200, transposed copies of int8 0.972 against 0.948, of bf16 0.986 against 0.965 (asked to drop it first: 0.920 and 0.943),
// channels_last beside contiguous 0.992 against 0.989. The former read no byte twice, so that it is stored lines leaving sooner that helps.
template <int N, class T> DEVICE vec<T, N> load_chunk(const T* p, bool fetches_block)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    vec<unsigned, 4> w;
    asm volatile("{ .reg .pred %%hint; setp.ne.u32 %%hint, %5, 0; @%%hint ld.global.L2::cache_hint.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4], %6; @!%%hint ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %6; }"
        : "=r"(w.at[0]), "=r"(w.at[1]), "=r"(w.at[2]), "=r"(w.at[3])
        : "l"(p), "r"((unsigned)fetches_block), "l"(keeping_policy()));
    return *reinterpret_cast<vec<T, N>*>(&w);
#else
    return load_vector<N>(p);
#endif
}

// Where columns do not begin at blocks of 256 bytes, the L2 fetches these whole: a transposed copy of bf16 0.950 against 0.905 of the
// wall on an H200. Where they do, that would cost it half a percent.
template <class T, class U> DEVICE bool fetches_blocks(U stride) { return stride * sizeof(T) % 256 != 0; }

// The chunks of a tile that a thread loads, every threads-th; a thread that has none left loads the last one again. All are inside the
// operand, and aligned.
template <int columns, int lines, int threads, class T, int N, int K, class I, class U>
DEVICE void load_lines(vec<T, N> (&v)[K], const T* p, U stride, I column0, I line0)
{
    const unsigned chunks = lines / N, total = columns * chunks;
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const unsigned own = threadIdx.x + k * threads, i = (k + 1) * threads <= total || own < total ? own : total - 1;
        v[k] = load_chunk<N>(p + ((U)(column0 + i / chunks) * stride + (U)(line0 + i % chunks * N)), fetches_blocks<T>(stride));
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
        v[k] = load_chunk<N>(p + (column < size0 && line < size1 ? (U)column * stride + (U)line : 0), fetches_blocks<T>(stride));
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
template <int columns, int lines, int threads, int width, class T, int N, int K, class I, class U>
DEVICE void fill_lines(vec<T, N>* tile, vec<T, N> (&v)[K], const T* p, U stride, I column0, I line0, I size0, I size1)
{
    const unsigned chunks = lines / N, total = columns * chunks;
    bool is_whole[K];
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const unsigned i = threadIdx.x + k * threads;
        const I column = column0 + (I)(i / chunks), line = line0 + (I)(i % chunks * N);
        is_whole[k] = i < total && column >= 0 && column < size0 && line + N <= size1;
        if (is_whole[k]) v[k] = load_vector<N>(p + ((U)column * stride + (U)line));
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
        if (i < total && column >= 0 && column < size0 && line < size1 && line + N > size1)
            write_tile(tile + tile_place<chunks>(i / chunks, i % chunks, tile_turn(i / chunks / width)), load_within<N>(p + (U)column * stride, line, size1));
    }
}

// A tile of operands that are not aligned lies there as their aligned words of 16 bytes: each column in a ring of its own, where the byte
// at address a has place a % ring. What is shifted is the address of the element that is read. So a word lies in its sector and its
// cache line as it does in memory: an H200 fetched sectors twice of which the halves changed places (32 of 18.7 million, 3 % of the time).
// The banks of neighbouring accesses differ as the addresses of columns that are 16 bytes of output apart do: where these are `alike`,
// the rings of each access are turned by a sector more than those of the last.
template <int ring, int width, bool alike> DEVICE unsigned ring_place(unsigned column, unsigned address) { return (address + (alike ? column / width * 32 : 0)) % ring; }

// A word to a tile; it is there after arrived() and a barrier. The L2 gets all 256 bytes of memory in which it is, the rest of which
// the next tile reads: bf16 from rows of any alignment 0.906 against 0.87 of the wall on an H200, 0.947 against 0.89 where all begin 64
// bytes behind a cache line. Kept by the L2 as chunks are. The `and` changes no address: beside a policy, ptxas before 13.4.59 would add
// the tile's own address within the copy and take it and the policy from registers that nothing has written, an illegal instruction
// (IST-DASLab/marlin issue 44, triton-lang/triton 11660).
template <class V> DEVICE void copy_word(V* to, const V* from, bool is_wanted)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    const unsigned place = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("{ .reg .pred %%wanted; .reg .b32 %%at; setp.ne.u32 %%wanted, %2, 0; and.b32 %%at, %0, -16; @%%wanted cp.async.cg.shared.global.L2::cache_hint.L2::256B [%%at], [%1], 16, %3; }" ::"r"(place), "l"(from), "r"((unsigned)is_wanted), "l"(keeping_policy()) : "memory");
#else
    if (is_wanted) write_tile(to, *from);
#endif
}

DEVICE void arrived()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// The words of a tile, eight threads to a cache line. Where the tile is not full, no more than those in which the operand's size0 columns
// of size1 elements lie, and of one that is partly outside the operand the elements that are not.
template <int columns, int lines, int threads, int width, int ring, bool alike, bool is_full, class T, int N, class I, class U>
DEVICE void copy_words(vec<T, N>* tile, const T* p, U stride, I column0, I line0, I size0, I size1, const T* begin, const T* end)
{
    // Words from the start of the cache line in which a column begins, at its last byte at the worst; whole lines of them.
    const unsigned places = ((lines * (unsigned)sizeof(T) + 126) / 16 + 1 + 7) / 8 * 8, total = columns * places;
    const unsigned bytes = (is_full || size1 - line0 > (I)lines ? (unsigned)lines : (unsigned)(size1 - line0)) * sizeof(T);
    const int at_once = is_full ? (total + threads - 1) / threads : 4;
#pragma unroll at_once
    for (unsigned k = 0; k < (total + threads - 1) / threads; ++k) {
        const unsigned i = threadIdx.x + k * threads, own = i / places, place = i % places * 16;
        const I column = column0 + (I)own;
        const char* line = reinterpret_cast<const char*>(p + ((U)column * stride + (U)line0));
        const unsigned before = (unsigned)(unsigned long long)line % 128;
        bool is_wanted = place + 15 - before < bytes + 15;  // as unsigned numbers: neither before the first line nor behind the last
        if ((k + 1) * threads > total) is_wanted = is_wanted && i < total;
        if (!is_full) is_wanted = is_wanted && column >= 0 && column < size0;
        const vec<T, N>* from = reinterpret_cast<const vec<T, N>*>(line - before + place);
        vec<T, N>* to = tile + (own * ring + ring_place<ring, width, alike>(own, (unsigned)(unsigned long long)line - before + place)) / 16;
        const T* first = reinterpret_cast<const T*>(from);
        if (is_full || (first >= begin && first + N <= end)) copy_word(to, from, is_wanted);
        else if (is_wanted) write_tile(to, load_within<N>(begin, first - begin, end - begin));
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

// One line of a tile of words: its elements in `width` columns, of which the first one's has this address, the next `step` bytes further.
template <int width, int ring, bool alike, bool is_cut, class T, int N>
DEVICE void gather_words(vec<T, 1> (&r)[width], const vec<T, N>* tile, unsigned column, unsigned address, unsigned step)
{
    const unsigned first = is_cut ? column : column / width * width;
#pragma unroll
    for (int e = 0; e < width; ++e) {
        const unsigned place = ring_place<ring, width, alike>(first + e, address + e * step) | column * ring;
        r[e] = read_tile(reinterpret_cast<const vec<T, 1>*>(reinterpret_cast<const char*>(tile) + place + e * ring));
    }
}
