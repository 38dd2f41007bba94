/* The kernel's clock, in microseconds since boot, of what happens in the virtual machine.
 *
 *   clock watch FOLDER NAME    a line for each time that NAME appears in FOLDER or goes: MICROSECONDS shown|gone
 *   clock late MILLISECONDS    a line for each time that the machine stood still for longer: MICROSECONDS, then for how many
 *   clock put FILE TEXT        writes TEXT into FILE, and prints when, taken before
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <time.h>
#include <unistd.h>

static long long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

static int watch(const char *folder, const char *name) {
    int events = inotify_init();
    if (events < 0 || inotify_add_watch(events, folder, IN_CREATE | IN_MOVED_TO | IN_MOVED_FROM | IN_DELETE) < 0) {
        perror(folder);
        return 1;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    static char buffer[65536] __attribute__((aligned(__alignof__(struct inotify_event))));
    ssize_t length;
    while ((length = read(events, buffer, sizeof buffer)) > 0) {
        long long at = now();
        for (char *next = buffer; next < buffer + length;) {
            struct inotify_event *event = (struct inotify_event *)next;
            if (event->len && strcmp(event->name, name) == 0)
                printf("%lld %s\n", at, event->mask & (IN_CREATE | IN_MOVED_TO) ? "shown" : "gone");
            next += sizeof *event + event->len;
        }
    }
    perror("read");
    return 1;
}

static void late(long long limit) {
    struct timespec moment = {0, 2000000};
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (;;) {
        long long before = now();
        nanosleep(&moment, NULL);
        long long after = now();
        if (after - before > limit) printf("%lld %lld\n", after, after - before);
    }
}

static int put(const char *path, const char *text) {
    int file = open(path, O_WRONLY);
    if (file < 0) {
        perror(path);
        return 1;
    }
    long long at = now();
    if (write(file, text, strlen(text)) < 0) {
        perror(path);
        return 1;
    }
    printf("%lld\n", at);
    return 0;
}

int main(int count, char **words) {
    if (count == 4 && strcmp(words[1], "watch") == 0) return watch(words[2], words[3]);
    if (count == 4 && strcmp(words[1], "put") == 0) return put(words[2], words[3]);
    if (count == 3 && strcmp(words[1], "late") == 0) late(atoll(words[2]) * 1000);
    fputs("usage: clock watch FOLDER NAME | clock late MILLISECONDS | clock put FILE TEXT\n", stderr);
    return 2;
}
