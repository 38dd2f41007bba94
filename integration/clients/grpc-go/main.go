// Calls a registration socket as the kubelet's plugin watcher does: SOCKET NAME [AUTHORITY]. Without AUTHORITY, grpc-go
// sends what it makes of the bare path.
package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

func main() {
	if err := run(os.Args[1], os.Args[2], os.Args[3:]); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

func run(socket, name string, authority []string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", address)
		}),
	}
	for _, text := range authority {
		options = append(options, grpc.WithAuthority(text))
	}
	// Deprecated, but it is what the kubelet calls: its default scheme is passthrough, so the path goes as it is.
	connection, err := grpc.DialContext(ctx, socket, append(options, grpc.WithBlock())...)
	if err != nil {
		return fmt.Errorf("dial: %w", err)
	}
	defer connection.Close()

	client := registerapi.NewRegistrationClient(connection)
	var endpoint string
	for range 3 {
		info, err := client.GetInfo(ctx, &registerapi.InfoRequest{})
		if err != nil {
			return fmt.Errorf("GetInfo: %w", err)
		}
		if info.Type != registerapi.CSIPlugin || info.Name != name || !strings.HasPrefix(info.Endpoint, "/") {
			return fmt.Errorf("GetInfo: unexpected %v", info)
		}
		endpoint = info.Endpoint
		status := &registerapi.RegistrationStatus{PluginRegistered: true}
		if _, err := client.NotifyRegistrationStatus(ctx, status); err != nil {
			return fmt.Errorf("NotifyRegistrationStatus: %w", err)
		}
	}
	fmt.Printf("grpc-go %s got %s at %s\n", grpc.Version, name, endpoint)
	return nil
}
