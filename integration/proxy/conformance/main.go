// Calls a gRPC server directly and through a proxy, and compares what came of it. Started by `run`, whose head says how.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
)

// check gives one answer directly and one through the proxy; they must be equal, and neither may have faults.
type check struct {
	name    string
	own     bool                // a server and a proxy of its own, because it ends or burdens them
	options []grpc.ServerOption // only with own
	needsUs bool                // about csi-warden's own promises; left out with another proxy
	run     func(*look) string
}

// look is one side of a check.
type look struct {
	*bed
	ctx     context.Context
	socket  string
	through bool
	faults  []string
}

// require notes a fault that no comparison would show.
func (l *look) require(good bool, format string, values ...any) {
	if !good {
		l.faults = append(l.faults, fmt.Sprintf(format, values...))
	}
}

// connect gives a connection that lasts as long as the check.
func (l *look) connect(options ...grpc.DialOption) *grpc.ClientConn {
	connection, err := dial(l.socket, options...)
	if err != nil {
		panic(err) // only options that contradict each other get here
	}
	context.AfterFunc(l.ctx, func() { connection.Close() })
	return connection
}

// patience bounds one side of one check: no check may hang the run.
const patience = 30 * time.Second

func (c check) look(b *bed, through bool) (seen string, faults []string) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	one := &look{bed: b, ctx: ctx, socket: b.driver, through: through}
	if through {
		one.socket = b.proxy
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		seen = c.run(one)
	}()
	select {
	case <-done:
		return seen, one.faults
	case <-time.After(patience + 5*time.Second):
		return "", []string{fmt.Sprintf("no end within %v", patience)}
	}
}

func (c check) both(shared *bed, through string) []string {
	beds := [2]*bed{shared, shared}
	if c.own {
		for side, words := range []string{direct, through} {
			made, err := openBed(words, c.options...)
			if err != nil {
				return []string{err.Error()}
			}
			defer made.close()
			beds[side] = made
		}
	}
	straight, faults := c.look(beds[0], false)
	for index := range faults {
		faults[index] = "direct: " + faults[index]
	}
	seen, more := c.look(beds[1], true)
	for _, fault := range more {
		faults = append(faults, "through: "+fault)
	}
	if straight != seen {
		faults = append(faults, "direct:  "+shortened(straight), "through: "+shortened(seen))
	}
	faults = slices.Compact(faults)
	if len(faults) > 0 && beds[1].process != nil {
		faults = append(faults, "its log: "+beds[1].logged())
	}
	return faults
}

// shortened keeps a line readable.
func shortened(text string) string {
	const most = 600
	if len(text) > most {
		return text[:most/2] + " … " + text[len(text)-most/2:]
	}
	return text
}

func main() {
	through := flag.String("through", "", "shell words of another proxy; $DRIVER and $PROXY are the sockets")
	only := flag.String("only", "", "checks whose name contains one of these words, by commas")
	before := flag.String("before", "", "only put the proxy before this driver's socket, print its pid and socket, and stay until a signal")
	list := flag.Bool("list", false, "names of the checks")
	flag.Parse()
	if *list {
		for _, check := range checks() {
			fmt.Println(check.name)
		}
		return
	}
	stop, release := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer release()
	if *before != "" {
		if err := stand(stop, *before, *through); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	shared, err := openBed(*through)
	if err != nil {
		fmt.Printf("FAIL start: %v\n0 passed, 1 failed\n", err)
		os.Exit(1)
	}
	passed, failed := 0, 0
	for _, check := range checks() {
		if stop.Err() != nil {
			break
		}
		if !wanted(check.name, *only) || check.needsUs && *through != "" {
			continue
		}
		began := time.Now()
		faults := check.both(shared, *through)
		word := "PASS"
		if len(faults) > 0 {
			word = "FAIL"
			failed++
		} else {
			passed++
		}
		fmt.Printf("%s %s (%.1f s)\n", word, check.name, time.Since(began).Seconds())
		for _, fault := range faults {
			fmt.Printf("    %s\n", fault)
		}
	}
	shared.close()
	fmt.Printf("%d passed, %d failed\n", passed, failed)
	if failed > 0 || passed == 0 {
		os.Exit(1)
	}
}

// stand lets other runs use the one way in which a proxy is started.
func stand(stop context.Context, driver, through string) error {
	b := &bed{folder: filepath.Dir(driver), driver: driver}
	if err := b.startProxy(through); err != nil {
		return err
	}
	fmt.Println(b.process.Process.Pid, b.proxy)
	select {
	case <-stop.Done():
	case err := <-b.ended:
		return fmt.Errorf("the proxy ended (%w): %s", err, b.logged())
	}
	_ = b.process.Process.Signal(syscall.SIGTERM) // it may have ended by itself
	<-b.ended
	return nil
}

func wanted(name, only string) bool {
	if only == "" {
		return true
	}
	for word := range strings.SplitSeq(only, ",") {
		if strings.Contains(name, word) {
			return true
		}
	}
	return false
}
