//! The methods of the CSI specification by name: calls of these are counted each by its own, all others as one.

/// Whether the specification has the method. Anybody who may call can make up others, and each would be a histogram for ever.
///
/// A driver that serves controller and node over one socket is called by the controller's sidecars, too. The methods are those of
/// version 1.12 and those that its master branch has beyond it.
///
/// Source: <https://github.com/container-storage-interface/spec/blob/master/csi.proto>
pub(super) fn is_csi(method: &str) -> bool {
    let Some((service, name)) = method.strip_prefix("/csi.v1.").and_then(|rest| rest.split_once('/')) else {
        return false;
    };
    match service {
        "Identity" => matches!(name, "GetPluginInfo" | "GetPluginCapabilities" | "Probe"),
        "Node" => matches!(
            name,
            "NodeStageVolume"
                | "NodeUnstageVolume"
                | "NodePublishVolume"
                | "NodeUnpublishVolume"
                | "NodeGetVolumeStats"
                | "NodeExpandVolume"
                | "NodeGetCapabilities"
                | "NodeGetInfo"
        ),
        "Controller" => matches!(
            name,
            "CreateVolume"
                | "DeleteVolume"
                | "ControllerPublishVolume"
                | "ControllerUnpublishVolume"
                | "ValidateVolumeCapabilities"
                | "ListVolumes"
                | "GetCapacity"
                | "ControllerGetCapabilities"
                | "CreateSnapshot"
                | "DeleteSnapshot"
                | "ListSnapshots"
                | "GetSnapshot"
                | "ControllerExpandVolume"
                | "ControllerGetVolume"
                | "ControllerModifyVolume"
                | "ControllerListVolumeHealth"
                | "ControllerGetVolumeHealth"
                | "ControllerGetNodeInfo"
        ),
        "GroupController" => matches!(
            name,
            "GroupControllerGetCapabilities"
                | "CreateVolumeGroupSnapshot"
                | "DeleteVolumeGroupSnapshot"
                | "GetVolumeGroupSnapshot"
        ),
        "SnapshotMetadata" => matches!(name, "GetMetadataAllocated" | "GetMetadataDelta"),
        _ => false,
    }
}
