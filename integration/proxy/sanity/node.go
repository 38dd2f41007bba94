package main

import (
	"context"
	"errors"
	"os"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func (d *driver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: d.node, MaxVolumesPerNode: maxVolumes}, nil
}

func (*driver) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	answer := &csi.NodeGetCapabilitiesResponse{}
	for _, kind := range []csi.NodeServiceCapability_RPC_Type{csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME,
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS, csi.NodeServiceCapability_RPC_EXPAND_VOLUME} {
		rpc := csi.NodeServiceCapability_RPC{Type: kind}
		answer.Capabilities = append(answer.Capabilities, &csi.NodeServiceCapability{Type: &csi.NodeServiceCapability_Rpc{Rpc: &rpc}})
	}
	return answer, nil
}

func (d *driver) NodeStageVolume(_ context.Context, in *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	d.lock.Lock()
	defer d.lock.Unlock()
	if in.VolumeId != "" && in.StagingTargetPath == "" {
		return nil, missing("staging path")
	}
	if in.VolumeId != "" && in.VolumeCapability == nil {
		return nil, missing("volume capability")
	}
	found, err := d.find(in.VolumeId)
	if err != nil {
		return nil, err
	}
	found.staged = in.StagingTargetPath
	return &csi.NodeStageVolumeResponse{}, nil
}

func (d *driver) NodeUnstageVolume(_ context.Context, in *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	d.lock.Lock()
	defer d.lock.Unlock()
	if in.VolumeId != "" && in.StagingTargetPath == "" {
		return nil, missing("staging path")
	}
	found, err := d.find(in.VolumeId)
	if err != nil {
		return nil, err
	}
	found.staged = ""
	return &csi.NodeUnstageVolumeResponse{}, nil
}

func (d *driver) NodePublishVolume(_ context.Context, in *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	d.lock.Lock()
	defer d.lock.Unlock()
	if in.VolumeId != "" && in.TargetPath == "" {
		return nil, missing("target path")
	}
	if in.VolumeId != "" && in.VolumeCapability == nil {
		return nil, missing("volume capability")
	}
	found, err := d.find(in.VolumeId)
	if err != nil {
		return nil, err
	}
	if found.staged == "" {
		return nil, status.Errorf(codes.FailedPrecondition, "%q is not staged", in.VolumeId)
	}
	// The suite looks for it.
	if err := os.MkdirAll(in.TargetPath, 0o700); err != nil {
		return nil, status.Errorf(codes.Internal, "%v", err)
	}
	found.published[in.TargetPath] = true
	return &csi.NodePublishVolumeResponse{}, nil
}

func (d *driver) NodeUnpublishVolume(_ context.Context, in *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	d.lock.Lock()
	defer d.lock.Unlock()
	if in.VolumeId != "" && in.TargetPath == "" {
		return nil, missing("target path")
	}
	found, err := d.find(in.VolumeId)
	if err != nil {
		return nil, err
	}
	if found.published[in.TargetPath] {
		if err := os.Remove(in.TargetPath); err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, status.Errorf(codes.Internal, "%v", err)
		}
	}
	delete(found.published, in.TargetPath)
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

func (d *driver) NodeGetVolumeStats(_ context.Context, in *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	d.lock.Lock()
	defer d.lock.Unlock()
	if in.VolumeId != "" && in.VolumePath == "" {
		return nil, missing("volume path")
	}
	found, err := d.find(in.VolumeId)
	if err != nil {
		return nil, err
	}
	if !found.published[in.VolumePath] {
		return nil, status.Errorf(codes.NotFound, "%q is not at %q", in.VolumeId, in.VolumePath)
	}
	usage := csi.VolumeUsage{Unit: csi.VolumeUsage_BYTES, Total: found.bytes, Available: found.bytes}
	return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{&usage}}, nil
}

func (d *driver) NodeExpandVolume(_ context.Context, in *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	d.lock.Lock()
	defer d.lock.Unlock()
	if in.VolumeId != "" && in.VolumePath == "" {
		return nil, missing("volume path")
	}
	found, err := d.find(in.VolumeId)
	if err != nil {
		return nil, err
	}
	return &csi.NodeExpandVolumeResponse{CapacityBytes: found.bytes}, nil
}
