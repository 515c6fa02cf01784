/* What a call like an earlier one asks and does on the host, without Python's interpreter: whether its tensors and all around them are
 * as they were (Guard), and one kernel on the current stream (Launcher). Knows addresses, bytes and callables, nothing of expressions;
 * the same in Python: shortcut.py, steps.py. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

#define MAX_TENSORS 64     /* of a guard; with more, Python's serves */
#define MAX_PARAMETERS 512 /* of a kernel: 4 kB of eight bytes each, which kernels take on every architecture */

/* CUlaunchConfig of cuda.h, a part of the driver's binary interface. */
struct launch_config {
    unsigned grid[3], block[3], shared_bytes;
    void *stream, *attributes;
    unsigned num_attributes;
};
typedef int (*launch_function)(const struct launch_config *, void *function, void **parameters, void **extra);

/* int64s of a tuple, in memory to be freed with PyMem_Free; NULL with an exception set. */
static int64_t *integers_of(PyObject *tuple)
{
    Py_ssize_t count = PyTuple_GET_SIZE(tuple);
    int64_t *integers = PyMem_Calloc(count ? count : 1, sizeof(int64_t));
    if (!integers) return (int64_t *)PyErr_NoMemory();
    for (Py_ssize_t k = 0; k < count; ++k) {
        integers[k] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, k));
        if (integers[k] == -1 && PyErr_Occurred()) {
            PyMem_Free(integers);
            return NULL;
        }
    }
    return integers;
}

/* ---- what both kinds of object begin with */

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *held;            /* a tuple of the objects that the rest points to */
    int64_t *numbers[2];       /* of this one's own */
    PyObject *data_ptr;        /* of a tensor: its address */
    void *(*read)(PyObject *); /* the same without a number of Python's, of tensors of these types that have an address: what it throws */
    PyTypeObject *of, *or_of;  /* nobody catches; NULL where torch has none */
} Callable;

/* An object of `type`, which has to begin as a Callable, with the int64s of two tuples; takes `held`. NULL with an exception set. */
static void *callable_new(PyTypeObject *type, vectorcallfunc call, PyObject *held, PyObject *address_of, PyObject *first, PyObject *second)
{
    PyObject *data_ptr, *of, *or_of;
    unsigned long long read;
    int is_known = held && PyArg_ParseTuple(address_of, "OKO!O!", &data_ptr, &read, &PyType_Type, &of, &PyType_Type, &or_of);
    Callable *callable = is_known ? (Callable *)type->tp_alloc(type, 0) : NULL;
    if (!callable) {
        Py_XDECREF(held);
        return NULL;
    }
    callable->call = call;
    callable->held = held;
    callable->data_ptr = data_ptr;
    callable->read = (void *(*)(PyObject *))(uintptr_t)read;
    callable->of = (PyTypeObject *)of;
    callable->or_of = (PyTypeObject *)or_of;
    if (!(callable->numbers[0] = integers_of(first)) || !(callable->numbers[1] = integers_of(second))) {
        Py_DECREF(callable);
        return NULL;
    }
    return callable;
}

/* The address of a tensor's first element; -1 with an exception set where there is none. */
static int64_t address_of(const Callable *callable, PyObject *tensor)
{
    if (callable->read && (Py_IS_TYPE(tensor, callable->of) || Py_IS_TYPE(tensor, callable->or_of)))
        return (int64_t)(intptr_t)callable->read(tensor);
    PyObject *number = PyObject_Vectorcall(callable->data_ptr, &tensor, 1, NULL);
    if (!number) return -1;
    int64_t address = (int64_t)PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return address;
}

/* Nothing is cleared before the object goes, as of a tuple: what takes a circle apart may still call it. */
static int callable_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((Callable *)self)->held);
    return 0;
}

static void callable_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(((Callable *)self)->held);
    PyMem_Free(((Callable *)self)->numbers[0]);
    PyMem_Free(((Callable *)self)->numbers[1]);
    type->tp_free(self);
    Py_DECREF(type);
}

/* ---- Guard */

typedef struct {
    Callable callable;
    PyObject *check;       /* of many tensors: whether they are alike */
    PyObject *found;       /* a tuple of (owner, name, value): what `find` has to find */
    const int64_t *phases; /* addresses modulo access_bytes, a tensor each */
    const int64_t *pairs;  /* (i, j, low, high): the address of j less that of i is not between low and high; 0 where these are 0 */
    int64_t access_bytes;
    Py_ssize_t num_tensors, num_pairs;
} Guard;

static int lie_alike(const Guard *guard, const int64_t *addresses)
{
    for (Py_ssize_t k = 0; k < guard->num_tensors; ++k)
        if (addresses[k] % guard->access_bytes != guard->phases[k]) return 0;
    for (const int64_t *pair = guard->pairs; pair < guard->pairs + 4 * guard->num_pairs; pair += 4) {
        int64_t apart = addresses[pair[1]] - addresses[pair[0]];
        int is_same = !pair[2] && !pair[3];
        if (is_same ? apart != 0 : pair[2] < apart && apart < pair[3]) return 0;
    }
    return 1;
}

/* What owner's attribute is, or owner's item where it is a dict, or owner() where name is None; NULL with an exception set, or none. */
static PyObject *find(PyObject *owner, PyObject *name)
{
    if (name == Py_None) return PyObject_CallNoArgs(owner);
    return PyDict_CheckExact(owner) ? Py_XNewRef(PyDict_GetItemWithError(owner, name)) : PyObject_GetAttr(owner, name);
}

/* 1 where all that was found is found again, 0 where it is not or is no longer to be found, -1 with an exception set. */
static int is_found_again(PyObject *found)
{
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(found); ++k) {
        PyObject *one = PyTuple_GET_ITEM(found, k), *value = find(PyTuple_GET_ITEM(one, 0), PyTuple_GET_ITEM(one, 1));
        if (!value) {
            if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) return -1;
            PyErr_Clear();
            return 0;
        }
        Py_DECREF(value);
        if (value != PyTuple_GET_ITEM(one, 2)) return 0;
    }
    return 1;
}

static PyObject *guard_call(PyObject *self, PyObject *const *args, size_t flags, PyObject *names)
{
    Guard *guard = (Guard *)self;
    Py_ssize_t count = PyVectorcall_NARGS(flags);
    if (names || count != guard->num_tensors) return PyErr_Format(PyExc_TypeError, "got %zd tensors, not %zd", count, guard->num_tensors);
    PyObject *answer = PyObject_Vectorcall(guard->check, args, count, NULL);
    if (!answer) return NULL;
    Py_DECREF(answer);
    if (answer != Py_True) Py_RETURN_FALSE;
    int64_t addresses[MAX_TENSORS];
    for (Py_ssize_t k = 0; k < count; ++k) {
        addresses[k] = address_of(&guard->callable, args[k]);
        if (addresses[k] == -1 && PyErr_Occurred()) return NULL;
    }
    if (!lie_alike(guard, addresses)) Py_RETURN_FALSE;
    int is_alike = is_found_again(guard->found);
    return is_alike < 0 ? NULL : PyBool_FromLong(is_alike);
}

static PyObject *guard_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"check", "address_of", "phases", "access_bytes", "pairs", "found", NULL};
    PyObject *check, *address_of, *phases, *pairs, *found;
    long long access_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!O!LO!O!", names, &check, &PyTuple_Type, &address_of, &PyTuple_Type, &phases,
                                     &access_bytes, &PyTuple_Type, &pairs, &PyTuple_Type, &found))
        return NULL;
    if (PyTuple_GET_SIZE(phases) > MAX_TENSORS) return PyErr_Format(PyExc_ValueError, "more than %d tensors", MAX_TENSORS);
    Guard *guard = callable_new(type, guard_call, PyTuple_Pack(3, check, address_of, found), address_of, phases, pairs);
    if (!guard) return NULL;
    guard->check = check;
    guard->found = found;
    guard->phases = guard->callable.numbers[0];
    guard->pairs = guard->callable.numbers[1];
    guard->access_bytes = access_bytes;
    guard->num_tensors = PyTuple_GET_SIZE(phases);
    guard->num_pairs = PyTuple_GET_SIZE(pairs) / 4;
    return (PyObject *)guard;
}

/* ---- Launcher */

typedef struct {
    Callable callable;
    launch_function launch;
    struct launch_config config;
    void *function;
    PyObject *stream_of, *bind, *refuse, *index; /* refuse(status): the exception */
    const char *types;                           /* of the words: l an int, d a float */
    const int64_t *offsets, *sizes; /* bytes behind each tensor's first element; parameters between the tensors and the words */
    Py_ssize_t num_tensors, num_sizes, num_words;
    long device;
} Launcher;

static _Thread_local uint64_t bound; /* the devices, by bit, whose context this thread has asked for; one beyond them asks each time */

static int be_bound(const Launcher *launcher)
{
    uint64_t bit = launcher->device < 64 ? (uint64_t)1 << launcher->device : 0;
    if (bound & bit) return 0;
    PyObject *done = PyObject_CallOneArg(launcher->bind, launcher->index);
    if (!done) return -1;
    Py_DECREF(done);
    bound |= bit;
    return 0;
}

static int put_word(int64_t *slot, char type, PyObject *word)
{
    if (type == 'd') {
        double number = PyFloat_AsDouble(word);
        memcpy(slot, &number, sizeof number);
    } else
        *slot = PyLong_AsLongLong(word);
    return *slot == -1 || type == 'd' ? -(PyErr_Occurred() != NULL) : 0;
}

static PyObject *launcher_call(PyObject *self, PyObject *const *args, size_t flags, PyObject *names)
{
    Launcher *launcher = (Launcher *)self;
    Py_ssize_t count = PyVectorcall_NARGS(flags), num_tensors = launcher->num_tensors, num_sizes = launcher->num_sizes;
    if (names || count != num_tensors + launcher->num_words)
        return PyErr_Format(PyExc_TypeError, "got %zd arguments, not %zd tensors and %zd words", count, num_tensors, launcher->num_words);
    int64_t slots[MAX_PARAMETERS];
    void *parameters[MAX_PARAMETERS];
    Py_ssize_t total = num_tensors + num_sizes + launcher->num_words;
    for (Py_ssize_t k = 0; k < num_tensors; ++k) {
        int64_t address = address_of(&launcher->callable, args[k]);
        if (address == -1 && PyErr_Occurred()) return NULL;
        slots[k] = address + launcher->offsets[k];
    }
    memcpy(slots + num_tensors, launcher->sizes, num_sizes * sizeof(int64_t));
    for (Py_ssize_t k = 0; k < launcher->num_words; ++k)
        if (put_word(slots + num_tensors + num_sizes + k, launcher->types[k], args[num_tensors + k]) < 0) return NULL;
    for (Py_ssize_t k = 0; k < total; ++k) parameters[k] = slots + k;
    if (be_bound(launcher) < 0) return NULL;
    PyObject *stream = PyObject_CallOneArg(launcher->stream_of, launcher->index);
    if (!stream) return NULL;
    struct launch_config config = launcher->config;
    config.stream = PyLong_AsVoidPtr(stream);
    Py_DECREF(stream);
    if (!config.stream && PyErr_Occurred()) return NULL;
    int status;
    Py_BEGIN_ALLOW_THREADS /* a full queue makes the driver wait, maybe for a callback that needs the interpreter */
    status = launcher->launch(&config, launcher->function, parameters, NULL);
    Py_END_ALLOW_THREADS
    if (!status) Py_RETURN_NONE;
    PyObject *number = PyLong_FromLong(status), *error = number ? PyObject_CallOneArg(launcher->refuse, number) : NULL;
    Py_XDECREF(number);
    if (error) PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_XDECREF(error);
    return NULL;
}

static PyObject *launcher_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"launch", "config", "function", "kept", "address_of", "stream_of", "bind", "refuse",
                            "device", "offsets", "sizes", "types", NULL};
    unsigned long long launch, function;
    const char *config;
    Py_ssize_t config_bytes;
    PyObject *kept, *address_of, *stream_of, *bind, *refuse, *index, *offsets, *sizes, *types;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Ky#KOO!OOOO!O!O!U", names, &launch, &config, &config_bytes, &function, &kept,
                                     &PyTuple_Type, &address_of, &stream_of, &bind, &refuse, &PyLong_Type, &index, &PyTuple_Type, &offsets,
                                     &PyTuple_Type, &sizes, &types))
        return NULL;
    if (config_bytes < (Py_ssize_t)sizeof(struct launch_config))
        return PyErr_Format(PyExc_ValueError, "a launch is described in %zu bytes, not %zd", sizeof(struct launch_config), config_bytes);
    if (PyTuple_GET_SIZE(offsets) + PyTuple_GET_SIZE(sizes) + PyUnicode_GET_LENGTH(types) > MAX_PARAMETERS)
        return PyErr_Format(PyExc_ValueError, "more than %d parameters", MAX_PARAMETERS);
    long number = PyLong_AsLong(index);
    const char *letters = PyUnicode_AsUTF8(types);
    if ((number == -1 && PyErr_Occurred()) || !letters) return NULL;
    PyObject *held = PyTuple_Pack(7, kept, address_of, stream_of, bind, refuse, index, types); /* kept: owns function and attributes */
    Launcher *launcher = callable_new(type, launcher_call, held, address_of, offsets, sizes);
    if (!launcher) return NULL;
    launcher->launch = (launch_function)(uintptr_t)launch;
    memcpy(&launcher->config, config, sizeof launcher->config);
    launcher->function = (void *)(uintptr_t)function;
    launcher->stream_of = stream_of;
    launcher->bind = bind;
    launcher->refuse = refuse;
    launcher->index = index;
    launcher->types = letters;
    launcher->offsets = launcher->callable.numbers[0];
    launcher->sizes = launcher->callable.numbers[1];
    launcher->num_tensors = PyTuple_GET_SIZE(offsets);
    launcher->num_sizes = PyTuple_GET_SIZE(sizes);
    launcher->num_words = PyUnicode_GET_LENGTH(types);
    launcher->device = number;
    return (PyObject *)launcher;
}

/* ---- the module */

static PyMemberDef members[] = {{"__vectorcalloffset__", T_PYSSIZET, offsetof(Callable, call), READONLY, NULL}, {NULL}};

#define SLOTS(new)                                                                                                                      \
    {{Py_tp_new, new},                     {Py_tp_dealloc, callable_dealloc}, {Py_tp_traverse, callable_traverse},                      \
     {Py_tp_call, PyVectorcall_Call},      {Py_tp_members, members},          {0, NULL}}
#define FLAGS (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL)

static PyType_Slot guard_slots[] = SLOTS(guard_new), launcher_slots[] = SLOTS(launcher_new);
static PyType_Spec guard_spec = {"wideload_native.Guard", sizeof(Guard), 0, FLAGS, guard_slots};
static PyType_Spec launcher_spec = {"wideload_native.Launcher", sizeof(Launcher), 0, FLAGS, launcher_slots};

static int fill(PyObject *module)
{
    PyType_Spec *specs[] = {&guard_spec, &launcher_spec};
    for (int k = 0; k < 2; ++k) {
        PyObject *type = PyType_FromModuleAndSpec(module, specs[k], NULL);
        int status = type ? PyModule_AddType(module, (PyTypeObject *)type) : -1;
        Py_XDECREF(type);
        if (status < 0) return -1;
    }
    return 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, fill}, {0, NULL}};
static PyModuleDef module_def = {PyModuleDef_HEAD_INIT, "wideload_native", NULL, 0, NULL, module_slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_wideload_native(void) { return PyModuleDef_Init(&module_def); }
