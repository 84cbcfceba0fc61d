/* A message holds one link out and one link in, each for bytes / rate:
 *
 *   from  |  out: waits its turn, bytes/rate  |
 *   to            latency ->      | in: waits its turn, bytes/rate |  arrives
 *
 * Inside a node each rank has a link of its own; between nodes each node has one NIC, which its ranks share. Out and in
 * are separate links (full duplex). Without other traffic a message arrives after latency + bytes / rate.
 *
 * A link is a short sorted list of the times at which it is taken, from now on; a message gets the first gap that it
 * fits, since one that was named later may well be there earlier. Neighbours are joined, so the list stays short;
 * should it become full, messages queue behind its end. */
#include "comm/transport/loop_links.h"

#include <stdlib.h>
#include <string.h>

#define TOUCH_S 1e-9 /* closer than this is rounding */

enum { SPANS = 64 };

typedef struct Span {
    double start_s, end_s;
} Span;

typedef struct Link {
    Span taken[SPANS];
    int count;
} Link;

struct LinkModel {
    double latency_s[2], s_per_byte[2]; /* inside a node, between nodes */
    int ranks;
    Link *links; /* Link[inside, between][out, in][ranks]: of a rank, of a node */
};

LinkModel *link_model_create(const LoopLinks *links, int ranks) {
    LinkModel *model = calloc(1, sizeof *model);
    Link *all = calloc((size_t)ranks * 4, sizeof *all);
    if (!model || !all) {
        free(model);
        free(all);
        return NULL;
    }
    double inside = links->gb_per_s_inside, between = links->gb_per_s_between;
    *model = (LinkModel){.latency_s = {1e-6 * links->latency_inside_us, 1e-6 * links->latency_between_us},
                         .s_per_byte = {inside > 0 ? 1e-9 / inside : 0, between > 0 ? 1e-9 / between : 0},
                         .ranks = ranks,
                         .links = all};
    return model;
}

void link_model_destroy(LinkModel *model) {
    if (!model)
        return;
    free(model->links);
    free(model);
}

static void forget_past(Link *link, double now_s) {
    int past = 0;
    while (past < link->count && link->taken[past].end_s <= now_s)
        past++;
    link->count -= past;
    memmove(link->taken, link->taken + past, (size_t)link->count * sizeof(Span));
}

/* Puts a span before place, joined with its neighbours where they touch. */
static void insert(Link *link, int place, Span span) {
    Span *before = place > 0 ? &link->taken[place - 1] : NULL;
    Span *after = place < link->count ? &link->taken[place] : NULL;
    bool joins_before = before && span.start_s - before->end_s < TOUCH_S;
    bool joins_after = after && after->start_s - span.end_s < TOUCH_S;
    if (joins_before && joins_after) {
        before->end_s = after->end_s;
        link->count--;
        memmove(after, after + 1, (size_t)(link->count - place) * sizeof(Span));
    } else if (joins_before || (link->count == SPANS && before)) {
        before->end_s = span.end_s;
    } else if (joins_after) {
        after->start_s = span.start_s;
    } else {
        memmove(&link->taken[place + 1], &link->taken[place], (size_t)(link->count - place) * sizeof(Span));
        link->taken[place] = span;
        link->count++;
    }
}

/* Takes the link for a while, from `earliest_s` on or as soon after it as there is room. Returns when that begins. */
static double take(Link *link, double earliest_s, double duration_s, double now_s) {
    if (duration_s <= 0)
        return earliest_s;
    forget_past(link, now_s);
    int place = link->count == SPANS ? SPANS : 0;
    double start_s = place > 0 && link->taken[place - 1].end_s > earliest_s ? link->taken[place - 1].end_s : earliest_s;
    while (place < link->count && link->taken[place].start_s < start_s + duration_s) {
        if (link->taken[place].end_s > start_s)
            start_s = link->taken[place].end_s;
        place++;
    }
    insert(link, place, (Span){start_s, start_s + duration_s});
    return start_s;
}

double link_model_send(LinkModel *model, const int *node, int from, int to, size_t bytes, double now_s) {
    int between = node[from] != node[to];
    int out = between ? node[from] : from, in = between ? node[to] : to;
    double duration_s = (double)bytes * model->s_per_byte[between];
    Link *links = model->links + 2 * between * model->ranks;
    double left_s = take(&links[out], now_s, duration_s, now_s);
    return take(&links[model->ranks + in], left_s + model->latency_s[between], duration_s, now_s) + duration_s;
}
