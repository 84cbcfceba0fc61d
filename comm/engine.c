#include "comm/engine.h"

#include <assert.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct Engine {
    pthread_t thread;
    bool running; /* the thread exists: set once */
    pthread_mutex_t lock;
    pthread_cond_t posted, finished;
    /* under lock */
    EngineJob *job; /* NULL: none under way */
    void *argument;
    bool stop;
    Status status; /* of the last job */
    char line[1024];
};

static void run_job(Engine *engine) {
    EngineJob *job = engine->job;
    void *argument = engine->argument;
    pthread_mutex_unlock(&engine->lock);
    Status status = job(argument);
    pthread_mutex_lock(&engine->lock);
    engine->status = status;
    if (status != OK)
        snprintf(engine->line, sizeof engine->line, "%s", error_line());
    engine->job = NULL;
    pthread_cond_broadcast(&engine->finished);
}

static void *comm_thread(void *argument) {
    Engine *engine = argument;
    pthread_mutex_lock(&engine->lock);
    while (!engine->stop) {
        if (engine->job)
            run_job(engine);
        else
            pthread_cond_wait(&engine->posted, &engine->lock);
    }
    pthread_mutex_unlock(&engine->lock);
    return NULL;
}

Status engine_create(Engine **result) {
    Engine *engine = calloc(1, sizeof *engine);
    *result = engine;
    if (!engine)
        return fault("no memory for the comm thread");
    pthread_mutex_init(&engine->lock, NULL);
    pthread_cond_init(&engine->posted, NULL);
    pthread_cond_init(&engine->finished, NULL);
    int code = pthread_create(&engine->thread, NULL, comm_thread, engine);
    engine->running = code == 0;
    return code == 0 ? OK : fault("cannot start the comm thread: %s", strerror(code));
}

void engine_destroy(Engine *engine) {
    if (!engine)
        return;
    if (engine->running) {
        pthread_mutex_lock(&engine->lock);
        assert(!engine->job);
        engine->stop = true;
        pthread_cond_signal(&engine->posted);
        pthread_mutex_unlock(&engine->lock);
        pthread_join(engine->thread, NULL);
    }
    pthread_cond_destroy(&engine->posted);
    pthread_cond_destroy(&engine->finished);
    pthread_mutex_destroy(&engine->lock);
    free(engine);
}

void engine_post(Engine *engine, EngineJob *job, void *argument) {
    pthread_mutex_lock(&engine->lock);
    assert(!engine->job);
    engine->job = job;
    engine->argument = argument;
    pthread_cond_signal(&engine->posted);
    pthread_mutex_unlock(&engine->lock);
}

Status engine_wait(Engine *engine) {
    pthread_mutex_lock(&engine->lock);
    while (engine->job)
        pthread_cond_wait(&engine->finished, &engine->lock);
    Status status = engine->status;
    pthread_mutex_unlock(&engine->lock);
    return status == OK ? OK : error_restore(status, engine->line); /* no job is under way: the line stays */
}

Status engine_call(Engine *engine, EngineJob *job, void *argument) {
    engine_post(engine, job, argument);
    return engine_wait(engine);
}
