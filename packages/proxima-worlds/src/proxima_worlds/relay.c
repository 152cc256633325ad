// The first process in a container or sandbox without a network. Static, so that it runs in any image.
//
//     relay FOLDER PORT [COMMAND…]   run COMMAND, or wait; end when FOLDER/life is closed, which ends the container
//     relay exec SECONDS COMMAND…    run COMMAND in a session of its own, which is killed after SECONDS
//     relay read FILE                write a regular file of at most MOST bytes; else end with 1
//     relay                          do nothing: a trial
//
// Connections to PORT of the loopback interface are forwarded to the unix socket FOLDER/net; PORT 0: none. The exit code
// is COMMAND's, 128 + N after signal N, 127 if it can't be started; 124 after SECONDS. COMMAND can't make the system calls
// that the filter refuses which is in the file `filter` beside this program, if there is one.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

enum { GONE = 143, TIMED_OUT = 124, NOT_STARTED = 127, STACK = 1 << 16, MOST = 1 << 14 };

static const char *folder;
static pid_t session;
static struct sock_filter calls[1024];
static struct sock_fprog filter = {.filter = calls};

static void fail(const char *what) {
    fprintf(stderr, "proxima relay: %s: %s\n", what, strerror(errno));
    exit(125);
}

static int connect_to(const char *name) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s/%s", folder, name);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) == 0) return fd;
    close(fd);
    return -1;
}

static void start(void *(*routine)(void *), void *argument) {
    pthread_t thread;
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, STACK);
    pthread_attr_setdetachstate(&small, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&thread, &small, routine, argument)) fail("thread");
}

struct connection {
    int ends[2], done;
    pthread_mutex_t lock;
};

static void copy(struct connection *both, int way) {
    char buffer[STACK / 4];
    ssize_t size, sent = 0;
    while (sent >= 0 && (size = read(both->ends[way], buffer, sizeof buffer)) > 0)
        for (ssize_t at = 0; at < size && sent >= 0; at += sent) sent = write(both->ends[!way], buffer + at, size - at);
    shutdown(both->ends[!way], SHUT_WR);
    if (sent < 0) shutdown(both->ends[way], SHUT_RD);
    pthread_mutex_lock(&both->lock);
    int last = both->done++;
    pthread_mutex_unlock(&both->lock);
    if (last) {
        close(both->ends[0]);
        close(both->ends[1]);
        free(both);
    }
}

static void *there(void *both) { return copy(both, 0), NULL; }
static void *back(void *both) { return copy(both, 1), NULL; }

static void *accept_all(void *listening) {
    while (1) {
        int near = accept4(*(int *)listening, NULL, NULL, SOCK_CLOEXEC), far = near < 0 ? -1 : connect_to("net");
        if (far < 0) {
            close(near);
            if (near < 0) usleep(10000);  // no descriptor is left
            continue;
        }
        struct connection *both = calloc(1, sizeof *both);
        both->ends[0] = near, both->ends[1] = far;
        pthread_mutex_init(&both->lock, NULL);
        start(there, both);
        start(back, both);
    }
    return NULL;
}

static void *await_end(void *life) {
    char byte;
    while (read(*(int *)life, &byte, 1) > 0 || errno == EINTR) errno = 0;
    _exit(GONE);  // of the first process of a container: the kernel kills the others
}

static int listen_at(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), yes = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, 64)) fail("loopback interface");
    return fd;
}

static pid_t run(char **command) {
    prctl(PR_SET_DUMPABLE, 0);  // the command may not read the memory of this process, nor trace it
    pid_t child = fork();
    if (child < 0) fail("fork");
    if (child) return child;
    prctl(PR_SET_DUMPABLE, 1);
    setsid();
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int score = open("/proc/self/oom_score_adj", O_WRONLY);  // what runs out of memory is the command
    if (score >= 0 && write(score, "1000", 4) > 0) close(score);
    signal(SIGPIPE, SIG_DFL);
    signal(SIGCHLD, SIG_DFL);
    if (filter.len && (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter)))
        fail("filter of system calls");
    execvp(*command, command);
    fprintf(stderr, "%s can't be started: %s\n", *command, strerror(errno));
    _exit(NOT_STARTED);
}

static void read_filter(const char *program) {
    char path[256];
    const char *name = strrchr(program, '/');
    snprintf(path, sizeof path, "%.*s/filter", name ? (int)(name - program) : 0, program);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? 0 : read(fd, calls, sizeof calls);
    if (size < 0 || size == sizeof calls) fail("filter of system calls");
    filter.len = size / sizeof *calls;
}

static int oom_kills(const char *file) {
    char line[256];
    int count = 0;
    FILE *events = fopen(file, "re");
    while (events && fgets(line, sizeof line, events)) sscanf(line, "oom_kill %d", &count);
    return count;
}

static int wait_for(pid_t child) {
    int status;
    pid_t ended;
    while ((ended = wait(&status)) != child)
        if (ended < 0 && errno != EINTR) fail("wait");
    if (status && (oom_kills("/sys/fs/cgroup/memory.events") || oom_kills("/sys/fs/cgroup/memory/memory.oom_control")))
        fprintf(stderr, "out of memory: a process was killed at the container's limit\n");
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void time_out(int number) {
    (void)number;
    kill(-session, SIGKILL);
    _exit(TIMED_OUT);
}

static int show(const char *file) {
    static char text[MOST];
    struct stat facts;
    int fd = open(file, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &facts) || !S_ISREG(facts.st_mode) || facts.st_size > MOST) return 1;
    ssize_t size, sent = 0;
    if ((size = read(fd, text, sizeof text)) < 0) return 1;
    for (ssize_t at = 0; at < size; at += sent)
        if ((sent = write(1, text + at, size - at)) < 0) return 1;
    return 0;
}

int main(int count, char **words) {
    if (count < 3) return 0;  // a trial: this program runs here
    signal(SIGPIPE, SIG_IGN);
    if (!strcmp(words[1], "read")) return show(words[2]);
    read_filter(words[0]);
    if (!strcmp(words[1], "exec")) {
        session = run(words + 3);
        signal(SIGALRM, time_out);
        alarm(atoi(words[2]));
        return wait_for(session);
    }
    folder = words[1];
    static int life, listening;
    if ((life = connect_to("life")) < 0) fail("the run that started this container is gone");
    if (atoi(words[2])) listening = listen_at(atoi(words[2]));
    start(await_end, &life);
    if (listening) start(accept_all, &listening);
    if (count > 3) return wait_for(run(words + 3));
    signal(SIGCHLD, SIG_IGN);
    for (;;) pause();
}
