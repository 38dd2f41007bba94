package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

const (
	mib        = 1 << 20
	maxVolumes = 20
)

type volume struct {
	id, name  string
	bytes     int64
	attached  string
	readonly  bool
	staged    string
	published map[string]bool
}

type driver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedControllerServer
	csi.UnimplementedNodeServer
	name, node string
	lock       sync.Mutex
	count      int
	volumes    map[string]*volume
	snapshots  map[string]*csi.Snapshot
	names      map[string]string // of a snapshot -> its id
}

func newDriver(name, node string) *driver {
	return &driver{name: name, node: node, volumes: map[string]*volume{}, snapshots: map[string]*csi.Snapshot{}, names: map[string]string{}}
}

func missing(what string) error { return status.Errorf(codes.InvalidArgument, "%s is missing", what) }

// find gives a volume; the lock is held.
func (d *driver) find(id string) (*volume, error) {
	if id == "" {
		return nil, missing("volume id")
	}
	if found := d.volumes[id]; found != nil {
		return found, nil
	}
	return nil, status.Errorf(codes.NotFound, "no volume %q", id)
}

func (d *driver) next(kind string) string {
	d.count++
	return fmt.Sprintf("%s-%04d", kind, d.count)
}

// page gives the part of a list that a token and a number ask for.
func page[T any](all []T, token string, most int32) (part []T, next string, err error) {
	start := 0
	if token != "" {
		if start, err = strconv.Atoi(token); err != nil || start < 0 || start > len(all) {
			return nil, "", status.Errorf(codes.Aborted, "unknown token %q", token)
		}
	}
	end := len(all)
	if most > 0 && start+int(most) < end {
		end = start + int(most)
		next = strconv.Itoa(end)
	}
	return all[start:end], next, nil
}

func (d *driver) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: d.name, VendorVersion: "1"}, nil
}

func (*driver) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	service := csi.PluginCapability_Service{Type: csi.PluginCapability_Service_CONTROLLER_SERVICE}
	return &csi.GetPluginCapabilitiesResponse{Capabilities: []*csi.PluginCapability{{Type: &csi.PluginCapability_Service_{Service: &service}}}}, nil
}

func (*driver) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(true)}, nil
}

func (*driver) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	answer := &csi.ControllerGetCapabilitiesResponse{}
	for _, kind := range []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME,
		csi.ControllerServiceCapability_RPC_LIST_VOLUMES, csi.ControllerServiceCapability_RPC_GET_CAPACITY,
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT, csi.ControllerServiceCapability_RPC_LIST_SNAPSHOTS,
		csi.ControllerServiceCapability_RPC_EXPAND_VOLUME, csi.ControllerServiceCapability_RPC_CLONE_VOLUME,
	} {
		rpc := csi.ControllerServiceCapability_RPC{Type: kind}
		answer.Capabilities = append(answer.Capabilities, &csi.ControllerServiceCapability{Type: &csi.ControllerServiceCapability_Rpc{Rpc: &rpc}})
	}
	return answer, nil
}

func (d *driver) CreateVolume(_ context.Context, in *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	if in.Name == "" {
		return nil, missing("name")
	}
	if len(in.VolumeCapabilities) == 0 {
		return nil, missing("volume capabilities")
	}
	d.lock.Lock()
	defer d.lock.Unlock()
	if from := in.GetVolumeContentSource(); from != nil {
		if id := from.GetVolume().GetVolumeId(); from.GetVolume() != nil && d.volumes[id] == nil {
			return nil, status.Errorf(codes.NotFound, "no source volume %q", id)
		}
		if id := from.GetSnapshot().GetSnapshotId(); from.GetSnapshot() != nil && d.snapshots[id] == nil {
			return nil, status.Errorf(codes.NotFound, "no source snapshot %q", id)
		}
	}
	size := max(in.CapacityRange.GetRequiredBytes(), mib)
	for _, one := range d.volumes {
		if one.name == in.Name {
			if one.bytes != size {
				return nil, status.Errorf(codes.AlreadyExists, "%q has another size", in.Name)
			}
			return &csi.CreateVolumeResponse{Volume: one.described(in.VolumeContentSource)}, nil
		}
	}
	made := &volume{id: d.next("volume"), name: in.Name, bytes: size, published: map[string]bool{}}
	d.volumes[made.id] = made
	return &csi.CreateVolumeResponse{Volume: made.described(in.VolumeContentSource)}, nil
}

func (v *volume) described(source *csi.VolumeContentSource) *csi.Volume {
	return &csi.Volume{VolumeId: v.id, CapacityBytes: v.bytes, VolumeContext: map[string]string{"name": v.name}, ContentSource: source}
}

func (d *driver) DeleteVolume(_ context.Context, in *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	if in.VolumeId == "" {
		return nil, missing("volume id")
	}
	d.lock.Lock()
	defer d.lock.Unlock()
	delete(d.volumes, in.VolumeId)
	return &csi.DeleteVolumeResponse{}, nil
}

func (d *driver) ControllerPublishVolume(_ context.Context, in *csi.ControllerPublishVolumeRequest) (*csi.ControllerPublishVolumeResponse, error) {
	d.lock.Lock()
	defer d.lock.Unlock()
	if in.VolumeId != "" && in.NodeId == "" {
		return nil, missing("node id")
	}
	if in.VolumeId != "" && in.VolumeCapability == nil {
		return nil, missing("volume capability")
	}
	found, err := d.find(in.VolumeId)
	if err != nil {
		return nil, err
	}
	if in.NodeId != d.node {
		return nil, status.Errorf(codes.NotFound, "no node %q", in.NodeId)
	}
	if found.attached != "" && found.readonly != in.Readonly {
		return nil, status.Errorf(codes.AlreadyExists, "%q is attached the other way", in.VolumeId)
	}
	attached := 0
	for _, one := range d.volumes {
		if one.attached != "" && one != found {
			attached++
		}
	}
	if attached >= maxVolumes {
		return nil, status.Errorf(codes.ResourceExhausted, "%d volumes are attached", attached)
	}
	found.attached, found.readonly = in.NodeId, in.Readonly
	return &csi.ControllerPublishVolumeResponse{PublishContext: map[string]string{"device": "/dev/" + found.id}}, nil
}

func (d *driver) ControllerUnpublishVolume(_ context.Context, in *csi.ControllerUnpublishVolumeRequest) (*csi.ControllerUnpublishVolumeResponse, error) {
	if in.VolumeId == "" {
		return nil, missing("volume id")
	}
	d.lock.Lock()
	defer d.lock.Unlock()
	if found := d.volumes[in.VolumeId]; found != nil {
		found.attached = ""
	}
	return &csi.ControllerUnpublishVolumeResponse{}, nil
}

func (d *driver) ValidateVolumeCapabilities(_ context.Context, in *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	if in.VolumeId != "" && len(in.VolumeCapabilities) == 0 {
		return nil, missing("volume capabilities")
	}
	d.lock.Lock()
	defer d.lock.Unlock()
	if _, err := d.find(in.VolumeId); err != nil {
		return nil, err
	}
	confirmed := csi.ValidateVolumeCapabilitiesResponse_Confirmed{VolumeCapabilities: in.VolumeCapabilities}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: &confirmed}, nil
}

func (d *driver) ListVolumes(_ context.Context, in *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	d.lock.Lock()
	defer d.lock.Unlock()
	var all []*csi.ListVolumesResponse_Entry
	for _, one := range d.volumes {
		all = append(all, &csi.ListVolumesResponse_Entry{Volume: one.described(nil)})
	}
	slices.SortFunc(all, func(a, b *csi.ListVolumesResponse_Entry) int {
		return cmp.Compare(a.Volume.VolumeId, b.Volume.VolumeId)
	})
	part, next, err := page(all, in.StartingToken, in.MaxEntries)
	return &csi.ListVolumesResponse{Entries: part, NextToken: next}, err
}

func (*driver) GetCapacity(context.Context, *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	return &csi.GetCapacityResponse{AvailableCapacity: 1 << 40}, nil
}

func (d *driver) ControllerExpandVolume(_ context.Context, in *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
	d.lock.Lock()
	defer d.lock.Unlock()
	if in.VolumeId != "" && in.CapacityRange == nil {
		return nil, missing("capacity range")
	}
	found, err := d.find(in.VolumeId)
	if err != nil {
		return nil, err
	}
	found.bytes = max(found.bytes, in.CapacityRange.RequiredBytes)
	return &csi.ControllerExpandVolumeResponse{CapacityBytes: found.bytes, NodeExpansionRequired: true}, nil
}

func (d *driver) CreateSnapshot(_ context.Context, in *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	if in.Name == "" {
		return nil, missing("name")
	}
	d.lock.Lock()
	defer d.lock.Unlock()
	found, err := d.find(in.SourceVolumeId)
	if err != nil {
		return nil, err
	}
	if id := d.names[in.Name]; id != "" {
		if d.snapshots[id].SourceVolumeId != in.SourceVolumeId {
			return nil, status.Errorf(codes.AlreadyExists, "%q is of another volume", in.Name)
		}
		return &csi.CreateSnapshotResponse{Snapshot: d.snapshots[id]}, nil
	}
	made := &csi.Snapshot{SnapshotId: d.next("snapshot"), SourceVolumeId: found.id, SizeBytes: found.bytes, ReadyToUse: true, CreationTime: timestamppb.Now()}
	d.snapshots[made.SnapshotId], d.names[in.Name] = made, made.SnapshotId
	return &csi.CreateSnapshotResponse{Snapshot: made}, nil
}

func (d *driver) DeleteSnapshot(_ context.Context, in *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	if in.SnapshotId == "" {
		return nil, missing("snapshot id")
	}
	d.lock.Lock()
	defer d.lock.Unlock()
	delete(d.snapshots, in.SnapshotId)
	for name, id := range d.names {
		if id == in.SnapshotId {
			delete(d.names, name)
		}
	}
	return &csi.DeleteSnapshotResponse{}, nil
}

func (d *driver) ListSnapshots(_ context.Context, in *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
	d.lock.Lock()
	defer d.lock.Unlock()
	var all []*csi.ListSnapshotsResponse_Entry
	for _, one := range d.snapshots {
		if (in.SnapshotId == "" || in.SnapshotId == one.SnapshotId) && (in.SourceVolumeId == "" || in.SourceVolumeId == one.SourceVolumeId) {
			all = append(all, &csi.ListSnapshotsResponse_Entry{Snapshot: one})
		}
	}
	slices.SortFunc(all, func(a, b *csi.ListSnapshotsResponse_Entry) int {
		return cmp.Compare(a.Snapshot.SnapshotId, b.Snapshot.SnapshotId)
	})
	part, next, err := page(all, in.StartingToken, in.MaxEntries)
	return &csi.ListSnapshotsResponse{Entries: part, NextToken: next}, err
}
