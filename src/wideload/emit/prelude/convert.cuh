// convert<To>(x): what torch's .to() does on CUDA, between the types that arithmetic uses. Floating point to integer
// truncates and saturates at 32 or 64 bits (cvt.rzi), then wraps to the narrower type; anything but zero is true.

template <class To> struct conversion {
    template <class From> DEVICE To from(From x) { return (To)x; }
};

template <> struct conversion<bool> {
    template <class From> DEVICE bool from(From x) { return x != (From)0; }
};

template <> struct conversion<long long> {
    template <class From> DEVICE long long from(From x) { return (long long)x; }
    DEVICE long long from(float x) { return __float2ll_rz(x); }
    DEVICE long long from(double x) { return __double2ll_rz(x); }
};

template <> struct conversion<int> {
    template <class From> DEVICE int from(From x) { return (int)x; }
    DEVICE int from(float x) { return __float2int_rz(x); }
    DEVICE int from(double x) { return __double2int_rz(x); }
};

template <> struct conversion<unsigned long long> {
    template <class From> DEVICE unsigned long long from(From x) { return (unsigned long long)x; }
    DEVICE unsigned long long from(float x) { return __float2ull_rz(x); }
    DEVICE unsigned long long from(double x) { return __double2ull_rz(x); }
};

template <> struct conversion<unsigned> {
    template <class From> DEVICE unsigned from(From x) { return (unsigned)x; }
    DEVICE unsigned from(float x) { return __float2uint_rz(x); }
    DEVICE unsigned from(double x) { return __double2uint_rz(x); }
};

// By 32 bits: of a negative, 8 bits shifted within 16 would be another number (see `wrapped`).
DEVICE int widened(signed char x) { return (int)settled((unsigned)(int)x); }

template <> struct conversion<unsigned short> {
    // Of a negative in 32 bits that is narrowed the compiler makes one in 16 (see `wrapped`).
    template <class From> DEVICE unsigned short from(From x) { return (unsigned short)(sizeof(From) > 2 ? settled((unsigned)x) : x); }
    DEVICE unsigned short from(signed char x) { return (unsigned short)widened(x); }
    DEVICE unsigned short from(float x) { return (unsigned short)__float2uint_rz(x); }
    DEVICE unsigned short from(double x) { return (unsigned short)__double2uint_rz(x); }
};

template <class Narrow> struct narrow_conversion {
    template <class From> DEVICE Narrow from(From x) { return (Narrow)x; }
    DEVICE Narrow from(float x) { return (Narrow)__float2int_rz(x); }
    DEVICE Narrow from(double x) { return (Narrow)__double2int_rz(x); }
};

template <> struct conversion<short> : narrow_conversion<short> {
    using narrow_conversion<short>::from;
    template <class From> DEVICE short from(From x) { return (short)(sizeof(From) > 2 ? settled((unsigned)x) : x); }
    DEVICE short from(signed char x) { return (short)widened(x); }
};

template <> struct conversion<signed char> : narrow_conversion<signed char> {};

template <> struct conversion<unsigned char> : narrow_conversion<unsigned char> {};

template <class To, class From> DEVICE To convert(From x) { return conversion<To>::from(x); }
