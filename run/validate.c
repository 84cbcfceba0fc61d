#include "run/validate.h"

#include <math.h>

Status validate(const Validation *t, StepLog *log) {
    int batch = (int)t->settings->batch, seq_len = (int)t->settings->seq_len;
    int64_t sequences = t->settings->val_batches * batch;
    if (sequences > loader_sequences(t->data))
        sequences = loader_sequences(t->data);
    double sums[3] = {0}; /* nats, tokens, bytes */
    int64_t stride = (int64_t)comm_ranks(t->comm) * batch;
    for (int64_t first = (int64_t)comm_rank(t->comm) * batch; first < sequences; first += stride) {
        int count = (int)(sequences - first < batch ? sequences - first : batch);
        TRY(loader_read(t->data, first, count, t->inputs, t->targets));
        gpt2_forward(t->model, t->inputs, count, seq_len);
        sums[0] += gpt2_loss(t->model, t->targets) * count * seq_len;
        sums[1] += (double)count * seq_len;
        for (int i = 0; t->tokenizer && i < count * seq_len; i++) {
            size_t bytes = 0;
            tokenizer_decode(t->tokenizer, t->targets[i], &bytes);
            sums[2] += (double)bytes;
        }
    }
    TRY(comm_reduce(t->comm, sums, 3, COMM_SUM));
    log->validated = true;
    log->val_loss = sums[0] / sums[1];
    log->val_bits_per_byte = sums[2] > 0 ? sums[0] / sums[2] / 0.6931471805599453 : NAN;
    return OK;
}
