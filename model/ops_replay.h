/* The replay device: no arithmetic, only time. Each operation sleeps for as long as it is known to take elsewhere, and
 * parameters' gradients are pseudo-random; so many "GPUs" share a few cores while their communication is real.
 *
 * One Replay belongs to one rank. gpt2_create gets replay_ops() as its device and should get replay_memory: address
 * space for activations that is never touched. Parameters are never read; gradients are real memory.
 *
 *   Gradients  about normal, deviation 1e-4, of (seed, rank). Written once, by the first backward whose `accumulate` is
 *              false; later ones leave what the synchronisation made of them, and cost nothing. Rows of padding are 0.
 *   Loss       none, NaN: nothing is computed. */
#ifndef MODEL_OPS_REPLAY_H
#define MODEL_OPS_REPLAY_H

#include "base/config.h"
#include "base/memory.h"
#include "model/gpt2.h"

typedef struct ReplayConfig {
    char profile[OPTION_TEXT];     /* [replay] profile: a file written by log.profile, or "" */
    double forward_ms, backward_ms; /* without one: a micro-step of max_B x max_T takes so long */
} ReplayConfig;

extern const Option replay_options[];
extern const int replay_option_count;

typedef struct Replay Replay;

/* What each operation takes is known from here on. With a profile it is what the profile says, in proportion to the
 * rows of a call; BAD_INPUT when it lacks an operation of this model at max_T. Else forward_ms is spread over the
 * layers, and backward_ms over the head (whose forward runs there too) and the layers, in proportion to FLOPs; what
 * recompute repeats comes on top. BAD_INPUT when both ways are given, or none. */
Status replay_create(Replay **replay, const ReplayConfig *config, const Gpt2Config *model, const Gpt2Options *options,
                     int rank, uint64_t seed);
void replay_destroy(Replay *replay); /* accepts NULL */

const Ops *replay_ops(const Replay *replay);

/* Since since_s the rank has waited for what the next operation needs: that one, and all behind it, end later by as
 * much. Without this call an operation that comes late is shorter. */
void replay_waited(Replay *replay, double since_s);

/* Reserves address space only; touching it ends the program. */
extern const Allocator replay_memory;

#endif
