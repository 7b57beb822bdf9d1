/* Token ids out of a list of Python: see list_reader.py. */

#include <Python.h>
#include <stdint.h>

#ifdef Py_GIL_DISABLED
#error "the list could change while it is read"
#endif

/* Copies `count` numbers of a list that has as many; how many of them are plain integers of at least 0 in one
   digit, from the first on. Runs no Python, so nothing changes meanwhile. */
Py_ssize_t read_ids(PyObject *list, int32_t *ids, Py_ssize_t count)
{
    if (!PyList_CheckExact(list) || PyList_GET_SIZE(list) != count)
        return -1;
    for (Py_ssize_t at = 0; at < count; at++) {
        PyLongObject *number = (PyLongObject *)PyList_GET_ITEM(list, at);
        if (!PyLong_CheckExact((PyObject *)number))
            return at;
#if PY_VERSION_HEX >= 0x030C0000
        if (!PyUnstable_Long_IsCompact(number))
            return at;
        Py_ssize_t value = PyUnstable_Long_CompactValue(number);
        if (value < 0)
            return at;
#else
        Py_ssize_t digits = Py_SIZE((PyObject *)number);
        if (digits < 0 || digits > 1)
            return at;
        Py_ssize_t value = digits ? (Py_ssize_t)number->ob_digit[0] : 0;
#endif
        if (value > INT32_MAX)
            return at;
        ids[at] = (int32_t)value;
    }
    return count;
}
