package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// bed is a folder with a driver in it and a proxy before the driver.
type bed struct {
	folder string
	driver string // the driver's socket
	proxy  string // the proxy's socket
	*service
	server  *driver
	process *exec.Cmd
	ended   chan error
}

// direct, in place of the words of a proxy, opens a bed without one.
const direct = "direct"

// openBed starts both and waits until the proxy can be called.
func openBed(through string, options ...grpc.ServerOption) (*bed, error) {
	folder, err := os.MkdirTemp("/tmp", "csi-x.") // short, because a socket's path is
	if err != nil {
		return nil, err
	}
	made := &bed{folder: folder, driver: filepath.Join(folder, "csi.sock"), service: &service{}}
	if made.server, err = serveDriver(made.driver, made.service, options...); err == nil && through != direct {
		err = made.startProxy(through)
	}
	if err != nil {
		made.close()
		return nil, err
	}
	return made, nil
}

// startProxy is the one place that knows how the proxy is started: by the shell words `through` if there are any, which find
// $DRIVER and $PROXY; else it is $CSI_WARDEN, and the registration socket tells where it listens, as it tells the kubelet.
func (b *bed) startProxy(through string) error {
	if through != "" {
		b.proxy = filepath.Join(b.folder, "proxy.sock")
		b.process = exec.Command("sh", "-c", "exec "+through)
		b.process.Env = append(os.Environ(), "DRIVER="+b.driver, "PROXY="+b.proxy, "FOLDER="+b.folder)
	} else {
		registration := filepath.Join(b.folder, "reg")
		if err := os.Mkdir(registration, 0o700); err != nil {
			return err
		}
		b.process = exec.Command(os.Getenv("CSI_WARDEN"), "run", "--proxy=on", "--csi-address="+b.driver,
			"--kubelet-registration-path="+b.driver, "--plugin-registration-path="+registration)
	}
	log, err := os.Create(filepath.Join(b.folder, "proxy.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	b.process.Stdout, b.process.Stderr = log, log
	if err := b.process.Start(); err != nil {
		return err
	}
	b.ended = make(chan error, 1)
	go func() { b.ended <- b.process.Wait() }()
	return b.waitFor("the proxy's socket", 10*time.Second, func() bool {
		if through == "" && b.proxy == "" {
			if shown, _ := filepath.Glob(filepath.Join(b.folder, "reg", "*-reg.sock")); len(shown) == 1 {
				b.proxy = announced(shown[0])
			}
		}
		if b.proxy == "" {
			return false
		}
		socket, err := net.Dial("unix", b.proxy)
		if err == nil {
			socket.Close()
		}
		return err == nil
	})
}

// announced asks as the kubelet does which endpoint is to be called; empty if nobody answers yet.
func announced(registration string) string {
	connection, err := dial(registration)
	if err != nil {
		return ""
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	info, err := registerapi.NewRegistrationClient(connection).GetInfo(ctx, &registerapi.InfoRequest{})
	if err != nil {
		return ""
	}
	return info.Endpoint
}

func (b *bed) waitFor(what string, patience time.Duration, happened func() bool) error {
	for end := time.Now().Add(patience); !happened(); time.Sleep(5 * time.Millisecond) {
		select {
		case err := <-b.ended:
			b.ended <- err
			return fmt.Errorf("the proxy ended (%v): %s", err, b.logged())
		default:
		}
		if time.Now().After(end) {
			return fmt.Errorf("not within %v: %s; log: %s", patience, what, b.logged())
		}
	}
	return nil
}

// logged gives the end of the proxy's log.
func (b *bed) logged() string {
	text, _ := os.ReadFile(filepath.Join(b.folder, "proxy.log"))
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(lines[max(0, len(lines)-4):], " | ")
}

func (b *bed) close() {
	if b.process != nil && b.process.Process != nil {
		_ = b.process.Process.Signal(syscall.SIGTERM) // it may have ended
		select {
		case err := <-b.ended:
			b.ended <- err
		case <-time.After(3 * time.Second):
			_ = b.process.Process.Kill()
			err := <-b.ended
			b.ended <- err
		}
	}
	if b.server != nil {
		b.server.server.Stop()
	}
	_ = os.RemoveAll(b.folder) // a leftover in /tmp is no failure
}

// memory gives KiB of the proxy by a field of its status: VmRSS, RssAnon, VmHWM.
func (b *bed) memory(field string) int {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", b.process.Process.Pid))
	for line := range strings.SplitSeq(string(text), "\n") {
		if name, value, found := strings.Cut(line, ":"); found && name == field {
			kib, _ := strconv.Atoi(strings.Fields(value)[0])
			return kib
		}
	}
	return 0
}

// descriptors counts the proxy's open files.
func (b *bed) descriptors() int {
	entries, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", b.process.Process.Pid))
	return len(entries)
}

// forgetPeak lets VmHWM begin anew.
func (b *bed) forgetPeak() error {
	return os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", b.process.Process.Pid), []byte("5"), 0)
}

// dial opens a connection as the kubelet's CSI client does.
func dial(socket string, options ...grpc.DialOption) (*grpc.ClientConn, error) {
	all := []grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority("localhost"),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage)),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", address)
		}),
	}
	return grpc.NewClient("passthrough:///"+socket, append(all, options...)...)
}
