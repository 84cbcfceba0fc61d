/* The text of injected faults, "kind:key=value,...;...", and what it means for one message, or for one step's gradient.
 * A message's fate is a pure function of the text, the sender and the message's number, so a test that fails fails again. */
#include "comm/transport/loop_faults.h"

#include "base/random.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char *const kinds[] = {"delay", "drop", "die", "nan"};

static bool is_word(const char *text, size_t length, const char *word) {
    return strlen(word) == length && strncmp(text, word, length) == 0;
}

static Status read_key(LoopFault *fault_, const char *text, size_t length) {
    const char *equals = memchr(text, '=', length);
    size_t name = equals ? (size_t)(equals - text) : 0;
    char *end = NULL;
    double value = equals ? strtod(equals + 1, &end) : -1;
    if (!equals || end == equals + 1 || end != text + length || !(value >= 0 && value <= 1e9))
        return bad_input("loop.faults: expected key=number, found '%.*s'", (int)length, text);
    int64_t *number = NULL;
    if (is_word(text, name, "rank"))
        number = &fault_->rank;
    else if (is_word(text, name, "every") && fault_->kind == FAULT_DELAY)
        number = &fault_->every;
    else if (is_word(text, name, "message") && (fault_->kind == FAULT_DROP || fault_->kind == FAULT_DIE))
        number = &fault_->message;
    else if (is_word(text, name, "step") && fault_->kind == FAULT_NAN)
        number = &fault_->step;
    else if (is_word(text, name, "ms") && fault_->kind == FAULT_DELAY)
        fault_->ms = value;
    else
        return bad_input("loop.faults: %s has no key '%.*s'", kinds[fault_->kind], (int)name, text);
    if (number && value != floor(value))
        return bad_input("loop.faults: expected a whole number, found '%.*s'", (int)length, text);
    if (number)
        *number = (int64_t)value;
    return OK;
}

static Status read_kind(LoopFault *fault_, const char *text, size_t length) {
    for (size_t kind = 0; kind < sizeof kinds / sizeof *kinds; kind++)
        if (is_word(text, length, kinds[kind])) {
            *fault_ = (LoopFault){.kind = kind, .rank = -1, .every = 1};
            return OK;
        }
    return bad_input("loop.faults: expected delay, drop, die or nan, found '%.*s'", (int)length, text);
}

static Status check(const LoopFault *fault_, const char *text, size_t length) {
    if (fault_->kind == FAULT_DELAY && !(fault_->ms > 0 && fault_->every > 0))
        return bad_input("loop.faults: '%.*s' needs ms", (int)length, text);
    if (fault_->kind != FAULT_DELAY && !(fault_->rank >= 0 && fault_->message + fault_->step > 0))
        return bad_input("loop.faults: '%.*s' needs rank and %s (1 is the first)", (int)length, text,
                         fault_->kind == FAULT_NAN ? "step" : "message");
    return OK;
}

static Status read_fault(LoopFault *fault_, const char *text, size_t length) {
    size_t at = strcspn(text, ":;");
    TRY(read_kind(fault_, text, at < length ? at : length));
    while (at < length) {
        size_t key = strcspn(text + at + 1, ",;");
        TRY(read_key(fault_, text + at + 1, key));
        at += 1 + key;
    }
    return check(fault_, text, length);
}

Status loop_faults_parse(LoopFaults *faults, const char *text) {
    faults->count = 0;
    while (*text) {
        size_t length = strcspn(text, ";");
        if (faults->count == LOOP_FAULTS_MAX)
            return bad_input("loop.faults: more than %d of them", LOOP_FAULTS_MAX);
        TRY(read_fault(&faults->faults[faults->count++], text, length));
        text += length + (text[length] == ';');
    }
    return OK;
}

LoopFate loop_faults_fate(const LoopFaults *faults, int rank, int64_t message) {
    LoopFate fate = {0};
    for (int i = 0; i < faults->count; i++) {
        const LoopFault *entry = &faults->faults[i];
        if (entry->rank >= 0 && entry->rank != rank)
            continue;
        if (entry->kind == FAULT_DELAY)
            fate.delay_s += random_bits((uint64_t)i, (uint64_t)rank, (uint64_t)message) % (uint64_t)entry->every == 0
                                ? 1e-3 * entry->ms
                                : 0;
        fate.drop |= entry->kind == FAULT_DROP && entry->message == message;
        fate.die |= entry->kind == FAULT_DIE && entry->message == message;
    }
    return fate;
}

bool loop_faults_nan(const LoopFaults *faults, int rank, int64_t step) {
    for (const LoopFault *entry = faults->faults; entry < faults->faults + faults->count; entry++)
        if (entry->kind == FAULT_NAN && entry->rank == rank && entry->step == step)
            return true;
    return false;
}
