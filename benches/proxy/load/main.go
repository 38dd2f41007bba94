// Both ends of the measurement: a driver of grpc-go that answers NodeGetInfo, and its caller.
//
//	load serve SOCKET                       until a signal
//	load call SOCKET PATTERN SECONDS|N      prints what it saw as JSON; N calls when it ends with "calls"
//	load hold SOCKET N                      N connections, each with one call behind it; until stdin ends
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(words []string) error {
	switch {
	case len(words) == 2 && words[0] == "serve":
		return serve(words[1])
	case len(words) == 4 && words[0] == "call":
		return call(words[1], words[2], words[3])
	case len(words) == 3 && words[0] == "hold":
		return hold(words[1], words[2])
	}
	return fmt.Errorf("usage: load serve SOCKET | call SOCKET kubelet|one|many SECONDS|Ncalls | hold SOCKET N")
}

type driver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedNodeServer
}

func (*driver) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: "load.csi-warden.example", VendorVersion: "1"}, nil
}

func (*driver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	segments := map[string]string{"topology.example/zone": "a", "topology.example/rack": "17"}
	return &csi.NodeGetInfoResponse{NodeId: "node-0123456789", MaxVolumesPerNode: 100, AccessibleTopology: &csi.Topology{Segments: segments}}, nil
}

func serve(socket string) error {
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	csi.RegisterIdentityServer(server, &driver{})
	csi.RegisterNodeServer(server, &driver{})
	return server.Serve(listener)
}

// dial is the kubelet's newGrpcConn.
func dial(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", address)
		}))
}

func ask(connection *grpc.ClientConn) error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute) // the kubelet's
	defer cancel()
	_, err := csi.NewNodeClient(connection).NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	return err
}

// Outcome is what one round gives.
type Outcome struct {
	Calls   int     `json:"calls"`
	Failed  int     `json:"failed"`
	Error   string  `json:"error,omitempty"` // the first
	Seconds float64 `json:"seconds"`
	P50     float64 `json:"p50"` // microseconds
	P99     float64 `json:"p99"`
}

func call(socket, pattern, length string) error {
	var left atomic.Int64
	left.Store(1 << 60)
	lasts := 10 * time.Minute
	if count, found := strings.CutSuffix(length, "calls"); found {
		number, err := strconv.ParseInt(count, 10, 64)
		if err != nil {
			return err
		}
		left.Store(number)
	} else {
		seconds, err := strconv.ParseFloat(length, 64)
		if err != nil {
			return err
		}
		lasts = time.Duration(seconds * float64(time.Second))
	}
	workers := map[string]int{"kubelet": 1, "one": 1, "many": 32}[pattern]
	if workers == 0 {
		return fmt.Errorf("no pattern %q", pattern)
	}
	connection, err := dial(socket)
	if err != nil {
		return err
	}
	defer connection.Close()
	once := func() error { return ask(connection) }
	if pattern == "kubelet" {
		once = func() error {
			connection, err := dial(socket)
			if err != nil {
				return err
			}
			defer connection.Close()
			return ask(connection)
		}
	}
	for range 20 { // lazy things are made
		if err := once(); err != nil {
			return err
		}
	}
	var lock sync.Mutex
	var took []float64
	var outcome Outcome
	var all sync.WaitGroup
	began := time.Now()
	for range workers {
		all.Go(func() {
			var mine []float64
			for time.Since(began) < lasts && left.Add(-1) >= 0 {
				start := time.Now()
				if err := once(); err != nil {
					lock.Lock()
					if outcome.Failed == 0 {
						outcome.Error = err.Error()
					}
					outcome.Failed++
					lock.Unlock()
					continue
				}
				mine = append(mine, float64(time.Since(start).Nanoseconds())/1000)
			}
			lock.Lock()
			took = append(took, mine...)
			lock.Unlock()
		})
	}
	all.Wait()
	outcome.Seconds, outcome.Calls = time.Since(began).Seconds(), len(took)
	if len(took) > 0 {
		slices.Sort(took)
		outcome.P50, outcome.P99 = took[len(took)/2], took[len(took)*99/100]
	}
	return json.NewEncoder(os.Stdout).Encode(outcome)
}

func hold(socket, number string) error {
	count, err := strconv.Atoi(number)
	if err != nil {
		return err
	}
	for range count {
		connection, err := dial(socket)
		if err != nil {
			return err
		}
		defer connection.Close()
		if err := ask(connection); err != nil {
			return err
		}
	}
	fmt.Println("held")
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}
