package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// wire is one HTTP/2 connection, written by hand: what grpc-go would never send, and what it hides of what it received.
type wire struct {
	net.Conn
	framer  *http2.Framer
	lock    sync.Mutex // of writes
	encoded bytes.Buffer
	encoder *hpack.Encoder
}

func newWire(connection net.Conn) *wire {
	made := &wire{Conn: connection, framer: http2.NewFramer(connection, connection)}
	made.framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	made.framer.MaxHeaderListSize = 1 << 20
	made.encoder = hpack.NewEncoder(&made.encoded)
	return made
}

// headers sends one block, in CONTINUATION frames where it is long. Fields go by turns: name, value.
func (w *wire) headers(stream uint32, end bool, fields ...string) {
	w.lock.Lock()
	defer w.lock.Unlock()
	w.encoded.Reset()
	for index := 0; index < len(fields); index += 2 {
		_ = w.encoder.WriteField(hpack.HeaderField{Name: fields[index], Value: fields[index+1]}) // into memory
	}
	block := w.encoded.Bytes()
	first := block[:min(len(block), 16<<10)]
	rest := block[len(first):]
	_ = w.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: first, EndStream: end, EndHeaders: len(rest) == 0})
	for len(rest) > 0 {
		part := rest[:min(len(rest), 16<<10)]
		rest = rest[len(part):]
		_ = w.framer.WriteContinuation(stream, len(rest) == 0, part)
	}
}

func (w *wire) data(stream uint32, end bool, bytes []byte) {
	w.lock.Lock()
	defer w.lock.Unlock()
	_ = w.framer.WriteData(stream, end, bytes) // a peer that is gone is what some checks are about
}

func (w *wire) reset(stream uint32, code http2.ErrCode) {
	w.lock.Lock()
	defer w.lock.Unlock()
	_ = w.framer.WriteRSTStream(stream, code)
}

func (w *wire) goAway(last uint32, code http2.ErrCode) {
	w.lock.Lock()
	defer w.lock.Unlock()
	_ = w.framer.WriteGoAway(last, code, nil)
}

// message frames one gRPC message.
func message(payload []byte) []byte {
	framed := make([]byte, 5, 5+len(payload))
	binary.BigEndian.PutUint32(framed[1:], uint32(len(payload)))
	return append(framed, payload...)
}

// housekeeping answers what any peer must answer; false if the frame is for the reader.
func (w *wire) housekeeping(frame http2.Frame) bool {
	w.lock.Lock()
	defer w.lock.Unlock()
	switch frame := frame.(type) {
	case *http2.SettingsFrame:
		if !frame.IsAck() {
			_ = w.framer.WriteSettingsAck()
		}
		return true
	case *http2.PingFrame:
		if !frame.IsAck() {
			_ = w.framer.WritePing(true, frame.Data)
		}
		return true
	case *http2.DataFrame:
		if size := uint32(frame.Length); size > 0 {
			_ = w.framer.WriteWindowUpdate(0, size)
			if !frame.StreamEnded() {
				_ = w.framer.WriteWindowUpdate(frame.StreamID, size)
			}
		}
	}
	return false
}

// rawCall is a request as the raw server got it.
type rawCall struct {
	*wire
	stream uint32
	path   string
	fields []hpack.HeaderField
}

// rawServer answers each request by `answer`, from the moment its headers are there.
type rawServer struct {
	listener net.Listener
	lock     sync.Mutex
	calls    []rawCall
	resets   []http2.ErrCode
	open     map[*wire]bool
}

func serveRaw(path string, settings []http2.Setting, answer func(rawCall)) (*rawServer, error) {
	listener, err := listen(path)
	if err != nil {
		return nil, err
	}
	made := &rawServer{listener: listener, open: map[*wire]bool{}}
	go func() {
		for {
			connection, err := listener.Accept()
			if err != nil {
				return
			}
			go made.converse(newWire(connection), settings, answer)
		}
	}()
	return made, nil
}

func (s *rawServer) converse(w *wire, settings []http2.Setting, answer func(rawCall)) {
	s.lock.Lock()
	s.open[w] = true
	s.lock.Unlock()
	defer w.Close()
	if _, err := io.ReadFull(w.Conn, make([]byte, len(http2.ClientPreface))); err != nil {
		return
	}
	w.lock.Lock()
	_ = w.framer.WriteSettings(settings...)
	w.lock.Unlock()
	for {
		frame, err := w.framer.ReadFrame()
		if err != nil {
			return
		}
		if w.housekeeping(frame) {
			continue
		}
		switch frame := frame.(type) {
		case *http2.MetaHeadersFrame:
			call := rawCall{wire: w, stream: frame.StreamID, path: frame.PseudoValue("path"), fields: frame.Fields}
			if !ordinary(call) {
				s.lock.Lock()
				s.calls = append(s.calls, call)
				s.lock.Unlock()
				answer(call)
			}
		case *http2.RSTStreamFrame:
			s.lock.Lock()
			s.resets = append(s.resets, frame.ErrCode)
			s.lock.Unlock()
		}
	}
}

// ordinary answers what a registrar asks, and the call by which a check finds that the raw server is reached.
func ordinary(call rawCall) bool {
	var reply []byte
	switch call.path {
	case "/csi.v1.Identity/GetPluginInfo":
		reply = append([]byte{0x0a, byte(len(driverName))}, driverName...)
	case "/csi.v1.Node/NodeGetInfo":
		reply = append([]byte{0x0a, 4}, "node"...)
	case "/csi.v1.Identity/Probe", "/csi.v1.Identity/GetPluginCapabilities", "/raw/Hello":
	default:
		return false
	}
	call.headers(call.stream, false, ":status", "200", "content-type", "application/grpc")
	call.data(call.stream, false, message(reply))
	call.headers(call.stream, true, "grpc-status", "0")
	return true
}

func (s *rawServer) close() {
	s.listener.Close()
	s.lock.Lock()
	defer s.lock.Unlock()
	for w := range s.open {
		w.Close()
	}
}

// rawAnswer is what came back for one raw request, frame by frame.
func rawAnswer(socket string, patience time.Duration, body []byte, fields ...string) string {
	connection, err := net.Dial("unix", socket)
	if err != nil {
		return "dial: " + err.Error()
	}
	defer connection.Close()
	_ = connection.SetDeadline(time.Now().Add(patience))
	w := newWire(connection)
	if _, err := io.WriteString(connection, http2.ClientPreface); err != nil {
		return "preface: " + err.Error()
	}
	if err := w.framer.WriteSettings(); err != nil {
		return "settings: " + err.Error()
	}
	w.headers(1, body == nil, fields...)
	if body != nil {
		w.data(1, true, body)
	}
	var told []string
	size := 0
	flush := func() {
		if size > 0 {
			told = append(told, fmt.Sprintf("DATA %d", size))
		}
		size = 0
	}
	for {
		frame, err := w.framer.ReadFrame()
		if err != nil {
			flush()
			return strings.Join(append(told, "connection ended"), "; ")
		}
		if w.housekeeping(frame) {
			continue
		}
		switch frame := frame.(type) {
		case *http2.MetaHeadersFrame:
			flush()
			told = append(told, fmt.Sprintf("HEADERS end=%t %s", frame.StreamEnded(), listed(frame.Fields)))
			if frame.StreamEnded() {
				return strings.Join(told, "; ")
			}
		case *http2.DataFrame:
			size += len(frame.Data())
			if frame.StreamEnded() {
				flush()
				return strings.Join(append(told, "end"), "; ")
			}
		case *http2.RSTStreamFrame:
			flush()
			return strings.Join(append(told, "RST_STREAM "+frame.ErrCode.String()), "; ")
		case *http2.GoAwayFrame:
			told = append(told, "GOAWAY "+frame.ErrCode.String())
		}
	}
}

// listed prints fields as they came: pseudo-headers first by nature, the others in order within a name.
func listed(fields []hpack.HeaderField) string {
	texts := make([]string, len(fields))
	for index, field := range fields {
		texts[index] = field.Name + "=" + strconv.Quote(field.Value)
	}
	return strings.Join(texts, " ")
}
