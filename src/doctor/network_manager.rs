//! Whether NetworkManager leaves `ib*` alone: it takes such interfaces down and up as it sees fit.

use super::finding::Finding;
use super::place::{Place, text, words};
use crate::policy::rdma::selector::matches_glob;
use crate::probe::tree::{Tree, is_absence};

const CHECK: &str = "rdma-networkmanager";

const FIX: &str = "printf '[keyfile]\\nunmanaged-devices+=interface-name:ib*\\n' > /etc/NetworkManager/conf.d/99-rdma.conf && nmcli general reload";

/// IP over InfiniBand, in `type` of an interface.
const ARPHRD_INFINIBAND: &str = "32";

/// Whether each interface over InfiniBand is left alone.
pub(super) fn check(place: &Place) -> Vec<Finding> {
    vec![finding(place)]
}

fn finding(place: &Place) -> Finding {
    let interfaces = interfaces(place);
    if interfaces.is_empty() {
        return Finding::not_applicable(CHECK, "no interface over InfiniBand (ib*) is to be seen");
    }
    if place.etc_is_doubtful {
        return Finding::unknown(CHECK, format!("{} may be the container's own", place.etc.display()))
            .with_fix("mount the host's /etc/NetworkManager below a folder and name that: --etc-root=/host/etc");
    }
    let configuration = match read(place) {
        Ok(Some(configuration)) => configuration,
        Ok(None) => return Finding::not_applicable(CHECK, format!("no {}/NetworkManager", place.etc.display())),
        Err(why) => return Finding::unknown(CHECK, why),
    };
    let managed: Vec<_> =
        interfaces.iter().filter(|name| !is_left_alone(&configuration, name)).map(String::as_str).collect();
    if managed.is_empty() {
        Finding::pass(CHECK, format!("NetworkManager leaves {} alone", interfaces.join(", ")))
    } else {
        Finding::fail(CHECK, format!("NetworkManager may manage {}", managed.join(", ")), FIX)
    }
}

fn interfaces(place: &Place) -> Vec<String> {
    let Ok(sysfs) = Tree::open(&place.host.sysfs) else { return Vec::new() };
    let mut names = sysfs.list("class/net").unwrap_or_default();
    names.retain(|name| {
        text(&sysfs, &format!("class/net/{name}/type")).is_ok_and(|kind| kind.trim() == ARPHRD_INFINIBAND)
    });
    names
}

/// All files, in the order in which NetworkManager reads them; `None` if it is not there.
fn read(place: &Place) -> Result<Option<String>, String> {
    let shown = place.etc.join("NetworkManager");
    let told = |error| format!("{}: {}", shown.display(), words(error));
    let etc = Tree::open(&place.etc).map_err(told)?;
    if !etc.exists("NetworkManager").map_err(told)? {
        return Ok(None);
    }
    let mut whole = String::new();
    let mut files = vec!["NetworkManager/NetworkManager.conf".to_owned()];
    match etc.list("NetworkManager/conf.d") {
        Ok(names) => {
            let settings = names.iter().filter(|name| name.ends_with(".conf"));
            files.extend(settings.map(|name| format!("NetworkManager/conf.d/{name}")));
        }
        Err(error) if is_absence(error) => {}
        Err(error) => return Err(told(error)),
    }
    for file in files {
        match text(&etc, &file) {
            Ok(text) => {
                whole.push_str(&text);
                whole.push('\n');
            }
            Err(error) if is_absence(error) => {}
            Err(error) => return Err(told(error)),
        }
    }
    Ok(Some(whole))
}

/// By `unmanaged-devices` of `[keyfile]`, or `managed=0` of a `[device…]` section that matches.
fn is_left_alone(configuration: &str, interface: &str) -> bool {
    let (mut section, mut unmanaged) = (String::new(), Vec::new());
    let mut devices: Vec<(Option<String>, bool)> = Vec::new();
    for line in configuration.lines().map(str::trim).filter(|line| !line.starts_with(['#', ';'])) {
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            section = name.to_owned();
            devices.push((None, false));
            continue;
        }
        let Some((key, value)) = line.split_once('=') else { continue };
        let (key, adds) = key.trim().strip_suffix('+').map_or((key.trim(), false), |key| (key.trim(), true));
        match (section.as_str(), key) {
            ("keyfile", "unmanaged-devices") => {
                if !adds {
                    unmanaged.clear();
                }
                unmanaged.push(value.trim().to_owned());
            }
            (device, "match-device") if device.starts_with("device") => {
                if let Some(last) = devices.last_mut() {
                    last.0 = Some(value.trim().to_owned());
                }
            }
            (device, "managed") if device.starts_with("device") => {
                if let Some(last) = devices.last_mut() {
                    last.1 = matches!(value.trim(), "0" | "false" | "no");
                }
            }
            _ => {}
        }
    }
    let by_section = devices.iter().filter(|(_, off)| *off);
    let by_section =
        by_section.map(|(specs, _)| specs.as_deref().unwrap_or("*")).any(|specs| matches_specs(specs, interface));
    matches_specs(&unmanaged.join(","), interface) || by_section
}

/// A list such as `interface-name:ib*;type:infiniband;except:interface-name:ib9`.
fn matches_specs(specs: &str, interface: &str) -> bool {
    let specs: Vec<&str> = specs.split([',', ';']).map(str::trim).filter(|spec| !spec.is_empty()).collect();
    let one = |spec: &str| match spec.split_once(':') {
        Some(("interface-name", pattern)) => fits(pattern.trim_start_matches(['=', '~']), interface),
        Some(("type", kind)) => kind == "infiniband",
        Some(("driver", driver)) => driver == "ib_ipoib",
        Some(_) => false,
        None => fits(spec, interface),
    };
    let except = |spec: &&str| spec.strip_prefix("except:").is_some_and(one);
    specs.iter().any(|spec| one(spec)) && !specs.iter().any(|spec| except(&spec.trim()))
}

fn fits(pattern: &str, name: &str) -> bool {
    matches_glob(pattern.as_bytes(), name.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_is_left_alone_by_a_list_or_a_section_and_by_nothing_else() {
        for (configuration, alone) in [
            ("", false),
            ("[keyfile]\nunmanaged-devices=interface-name:ib*\n", true),
            ("[keyfile]\n unmanaged-devices = mac:00:11;interface-name:ib0 \n", true),
            ("[keyfile]\nunmanaged-devices=type:infiniband\n", true),
            ("[keyfile]\nunmanaged-devices=interface-name:eth*\n", false),
            ("[keyfile]\n#unmanaged-devices=interface-name:ib*\n", false),
            ("[main]\nunmanaged-devices=interface-name:ib*\n", false),
            ("[keyfile]\nunmanaged-devices=*;except:interface-name:ib0\n", false),
            // A later file writes over an earlier one, or adds to it.
            (
                "[keyfile]\nunmanaged-devices=interface-name:ib*\n[keyfile]\nunmanaged-devices=interface-name:eth0\n",
                false,
            ),
            (
                "[keyfile]\nunmanaged-devices=interface-name:ib*\n[keyfile]\nunmanaged-devices+=interface-name:eth0\n",
                true,
            ),
            ("[device-ib]\nmatch-device=interface-name:ib*\nmanaged=0\n", true),
            ("[device-ib]\nmatch-device=interface-name:ib*\nmanaged=1\n", false),
            ("[device-eth]\nmatch-device=interface-name:eth*\nmanaged=0\n", false),
        ] {
            assert_eq!(is_left_alone(configuration, "ib0"), alone, "{configuration:?}");
        }
    }
}
