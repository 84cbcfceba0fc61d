/* Monotonic time in seconds, from an arbitrary start. */
#ifndef BASE_CLOCK_H
#define BASE_CLOCK_H

double clock_s(void);

#endif
