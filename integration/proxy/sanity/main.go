// A CSI driver of grpc-go that keeps everything in memory: something for the sanity suite to call that has a Controller, too.
// Its arguments are those of the mounting driver that the suite needs: --endpoint SOCKET --name NAME --node-id ID [--stage].
package main

import (
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"syscall"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
)

func main() {
	endpoint := flag.String("endpoint", "", "the socket to serve")
	name := flag.String("name", "", "the driver's name")
	node := flag.String("node-id", "", "what NodeGetInfo gives as the node's id")
	flag.Bool("stage", true, "always announced; there because the other driver has it")
	flag.Parse()
	listener, err := net.Listen("unix", *endpoint)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	server := grpc.NewServer()
	driver := newDriver(*name, *node)
	csi.RegisterIdentityServer(server, driver)
	csi.RegisterControllerServer(server, driver)
	csi.RegisterNodeServer(server, driver)
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		<-stop
		server.Stop()
	}()
	if err := server.Serve(listener); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
