/* What the prober container runs: the hardware is bad while /hardware/broken exists. */
#include <stdio.h>
#include <unistd.h>

int main(void) {
    if (access("/hardware/broken", F_OK) == 0) {
        puts("port mlx5_0/1 is down");
        return 1;
    }
    puts("all ports are up");
    return 0;
}
