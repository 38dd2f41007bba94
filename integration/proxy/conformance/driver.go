package main

import (
	"context"
	"errors"
	"net"
	"os"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	_ "google.golang.org/grpc/encoding/gzip" // registers the compressor
	"google.golang.org/protobuf/types/known/wrapperspb"
)

const driverName = "conformance.csi-warden.example"

// driver is a CSI driver of grpc-go with the scripted service beside what a registrar asks.
type driver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedNodeServer
	*service
	server *grpc.Server
}

func (*driver) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: driverName, VendorVersion: "1"}, nil
}

func (*driver) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	return &csi.GetPluginCapabilitiesResponse{}, nil
}

func (*driver) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(true)}, nil
}

func (*driver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: "node"}, nil
}

func (*driver) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	return &csi.NodeGetCapabilitiesResponse{}, nil
}

const maxMessage = 128 << 20

// serveDriver listens at the path; a socket that is there is replaced.
func serveDriver(path string, shared *service, options ...grpc.ServerOption) (*driver, error) {
	listener, err := listen(path)
	if err != nil {
		return nil, err
	}
	limits := []grpc.ServerOption{grpc.MaxRecvMsgSize(maxMessage), grpc.MaxSendMsgSize(maxMessage)}
	made := &driver{service: shared, server: grpc.NewServer(append(limits, options...)...)}
	csi.RegisterIdentityServer(made.server, made)
	csi.RegisterNodeServer(made.server, made)
	made.server.RegisterService(made.description(), nil)
	go func() { _ = made.server.Serve(listener) }() // ends with Stop
	return made, nil
}

func listen(path string) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	listener, err := net.Listen("unix", path)
	if err == nil {
		// A successor may hold the path by the time this one closes.
		listener.(*net.UnixListener).SetUnlinkOnClose(false)
	}
	return listener, err
}
