/* What every test program uses: cmocka, comparisons that fail on NaN, and a main that runs all tests or those whose
 * names match its arguments. */
#ifndef TESTS_CHECK_H
#define TESTS_CHECK_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* |actual - expected| <= tolerance, and not NaN. */
#define assert_close(actual, expected, tolerance)                                                                  \
    do {                                                                                                           \
        double actual_ = (actual), expected_ = (expected), tolerance_ = (tolerance);                               \
        if (!(fabs(actual_ - expected_) <= tolerance_))                                                            \
            fail_msg("%s: expected %.9g +- %.3g, found %.9g", #actual, expected_, tolerance_, actual_);            \
    } while (0)

#define assert_ok(call)                                                                                            \
    do {                                                                                                           \
        Status check_status_ = (call);                                                                             \
        if (check_status_ != OK)                                                                                   \
            fail_msg("%s: status %d: %s", #call, (int)check_status_, error_line());                                \
    } while (0)

/* The call is refused as bad input, with a line that contains `text`. */
#define assert_refused(call, text)                                                                                 \
    do {                                                                                                           \
        assert_int_equal((call), BAD_INPUT);                                                                       \
        if (!strstr(error_line(), (text)))                                                                         \
            fail_msg("%s: expected a line with '%s', found '%s'", #call, (text), error_line());                    \
    } while (0)

/* build/tests/test_x [pattern]: `pattern` is a name with * and ?. */
#define CHECK_MAIN(tests)                                                                                          \
    int main(int argc, char **argv) {                                                                              \
        if (argc > 1)                                                                                              \
            cmocka_set_test_filter(argv[1]);                                                                       \
        return cmocka_run_group_tests(tests, NULL, NULL) ? 1 : 0;                                                  \
    }

#endif
