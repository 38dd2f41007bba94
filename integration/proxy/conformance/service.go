package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// The service that every check calls. A call brings its own script in its metadata, so that the message is free.
const (
	serviceName = "csi_warden.conformance.v1.Script"
	scriptKey   = "script-bin"
)

// Script says what the server does with a call.
type Script struct {
	Code        codes.Code `json:",omitempty"`
	Message     []byte     `json:",omitempty"` // bytes, because JSON would mend what is not UTF-8
	Details     []byte     `json:",omitempty"` // one detail, a BytesValue
	Header      [][2]string
	Trailer     [][2]string
	HeaderFirst bool          `json:",omitempty"` // headers go out before anything else
	Sleep       time.Duration `json:",omitempty"`
	Hang        bool          `json:",omitempty"` // waits for the caller to give up
	Tell        bool          `json:",omitempty"` // the reply tells what the server saw
	Reply       int           `json:",omitempty"` // the reply has so many bytes; 0 echoes
	Count       int           `json:",omitempty"` // messages to send on a stream
	Gate        string        `json:",omitempty"` // waits at this gate before each message on a stream
	Gzip        bool          `json:",omitempty"`
	Early       int           `json:",omitempty"` // ends a client stream after so many messages
}

// Seen is what the server tells of a call.
type Seen struct {
	Metadata  metadata.MD
	Remaining time.Duration // 0: no deadline
	Method    string
	Size      int
	Sum       uint32
	Count     int
}

// service answers by script, and counts.
type service struct {
	running   atomic.Int64
	started   atomic.Int64
	cancelled atomic.Int64
	sent      atomic.Int64 // messages handed to grpc-go on streams
	received  atomic.Int64
	authority atomic.Value
	gates     sync.Map // name -> chan struct{}
}

type bytesValue = wrapperspb.BytesValue

// gate gives the channel of that name; a stream takes one token from it for each message.
func (s *service) gate(name string) chan struct{} {
	made, _ := s.gates.LoadOrStore(name, make(chan struct{}, 1<<20))
	return made.(chan struct{})
}

func scriptOf(ctx context.Context) (Script, metadata.MD, error) {
	var script Script
	md, _ := metadata.FromIncomingContext(ctx)
	if texts := md.Get(scriptKey); len(texts) == 1 {
		if err := json.Unmarshal([]byte(texts[0]), &script); err != nil {
			return script, md, status.Errorf(codes.Internal, "script: %v", err)
		}
	}
	return script, md, nil
}

func (s Script) status() error {
	if s.Code == codes.OK {
		return nil
	}
	answer := status.New(s.Code, string(s.Message))
	if s.Details != nil {
		detailed, err := answer.WithDetails(wrapperspb.Bytes(s.Details))
		if err != nil {
			return status.Errorf(codes.Internal, "details: %v", err)
		}
		answer = detailed
	}
	return answer.Err()
}

func pairs(list [][2]string) metadata.MD {
	md := metadata.MD{}
	for _, pair := range list {
		md.Append(pair[0], pair[1])
	}
	return md
}

func (s *service) seen(ctx context.Context, md metadata.MD) Seen {
	seen := Seen{Metadata: md}
	seen.Method, _ = grpc.Method(ctx)
	if deadline, ok := ctx.Deadline(); ok {
		seen.Remaining = time.Until(deadline)
	}
	return seen
}

func (s *service) begin(ctx context.Context) (end func()) {
	s.running.Add(1)
	s.started.Add(1)
	if md, ok := metadata.FromIncomingContext(ctx); ok {
		if texts := md.Get(":authority"); len(texts) > 0 {
			s.authority.Store(texts[0])
		}
	}
	return func() {
		if errors.Is(ctx.Err(), context.Canceled) || errors.Is(ctx.Err(), context.DeadlineExceeded) {
			s.cancelled.Add(1)
		}
		s.running.Add(-1)
	}
}

func (s *service) unary(ctx context.Context, in *bytesValue) (*bytesValue, error) {
	defer s.begin(ctx)()
	script, md, err := scriptOf(ctx)
	if err != nil {
		return nil, err
	}
	if script.HeaderFirst {
		if err := grpc.SendHeader(ctx, pairs(script.Header)); err != nil {
			return nil, err
		}
	} else if len(script.Header) > 0 {
		if err := grpc.SetHeader(ctx, pairs(script.Header)); err != nil {
			return nil, err
		}
	}
	if err := grpc.SetTrailer(ctx, pairs(script.Trailer)); err != nil {
		return nil, err
	}
	if script.Gzip {
		if err := grpc.SetSendCompressor(ctx, "gzip"); err != nil {
			return nil, err
		}
	}
	if script.Hang {
		<-ctx.Done()
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	if script.Sleep > 0 {
		select {
		case <-time.After(script.Sleep):
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
	if err := script.status(); err != nil {
		return nil, err
	}
	if script.Tell {
		seen := s.seen(ctx, md)
		seen.Size, seen.Sum = len(in.Value), crc32.ChecksumIEEE(in.Value)
		text, err := json.Marshal(seen)
		return wrapperspb.Bytes(text), err
	}
	if script.Reply > 0 {
		return wrapperspb.Bytes(pattern(script.Reply)), nil
	}
	return in, nil
}

// down sends script.Count messages.
func (s *service) down(stream grpc.ServerStream) error {
	defer s.begin(stream.Context())()
	script, _, err := scriptOf(stream.Context())
	if err != nil {
		return err
	}
	if err := stream.RecvMsg(&bytesValue{}); err != nil {
		return err
	}
	if err := stream.SetHeader(pairs(script.Header)); err != nil {
		return err
	}
	stream.SetTrailer(pairs(script.Trailer))
	if err := s.sendAll(stream, script); err != nil {
		return err
	}
	return script.status()
}

func (s *service) sendAll(stream grpc.ServerStream, script Script) error {
	var gate chan struct{}
	if script.Gate != "" {
		gate = s.gate(script.Gate)
	}
	for number := range script.Count {
		if gate != nil {
			select {
			case <-gate:
			case <-stream.Context().Done():
				return status.FromContextError(stream.Context().Err()).Err()
			}
		}
		size := max(script.Reply, 1)
		message := pattern(size)
		message[0] = byte(number)
		if err := stream.SendMsg(wrapperspb.Bytes(message)); err != nil {
			return err
		}
		s.sent.Add(1)
	}
	return nil
}

// up reads to the end, or script.Early messages, and tells how much there was.
func (s *service) up(stream grpc.ServerStream) error {
	defer s.begin(stream.Context())()
	script, md, err := scriptOf(stream.Context())
	if err != nil {
		return err
	}
	if script.Sleep > 0 {
		time.Sleep(script.Sleep)
	}
	seen, sum := s.seen(stream.Context(), md), crc32.NewIEEE()
	for script.Early == 0 || seen.Count < script.Early {
		in := &bytesValue{}
		err := stream.RecvMsg(in)
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		seen.Count++
		s.received.Add(1)
		seen.Size += len(in.Value)
		sum.Write(in.Value)
	}
	seen.Sum = sum.Sum32()
	if err := script.status(); err != nil {
		return err
	}
	stream.SetTrailer(pairs(script.Trailer))
	seen.Metadata, seen.Remaining = nil, 0
	text, err := json.Marshal(seen)
	if err != nil {
		return err
	}
	return stream.SendMsg(wrapperspb.Bytes(text))
}

// both echoes each message, and sends script.Count more once the caller has half-closed.
func (s *service) both(stream grpc.ServerStream) error {
	defer s.begin(stream.Context())()
	script, _, err := scriptOf(stream.Context())
	if err != nil {
		return err
	}
	if script.HeaderFirst {
		if err := stream.SendHeader(pairs(script.Header)); err != nil {
			return err
		}
	}
	stream.SetTrailer(pairs(script.Trailer))
	for {
		in := &bytesValue{}
		err := stream.RecvMsg(in)
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		if err := stream.SendMsg(in); err != nil {
			return err
		}
	}
	time.Sleep(script.Sleep)
	if err := s.sendAll(stream, script); err != nil {
		return err
	}
	return script.status()
}

// pattern gives bytes that differ from their neighbours, so that a swap or a loss is seen.
func pattern(size int) []byte {
	value := make([]byte, size)
	for index := range value {
		value[index] = byte(index*31 + index>>13)
	}
	return value
}

// description is what protoc would have made of the service.
func (s *service) description() *grpc.ServiceDesc {
	stream := func(name string, handler func(grpc.ServerStream) error, server, client bool) grpc.StreamDesc {
		answer := func(_ any, stream grpc.ServerStream) error { return handler(stream) }
		return grpc.StreamDesc{StreamName: name, Handler: answer, ServerStreams: server, ClientStreams: client}
	}
	unary := func(_ any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
		in := &bytesValue{}
		if err := decode(in); err != nil {
			return nil, err
		}
		return s.unary(ctx, in)
	}
	return &grpc.ServiceDesc{
		ServiceName: serviceName,
		HandlerType: (*any)(nil),
		Methods:     []grpc.MethodDesc{{MethodName: "Unary", Handler: unary}},
		Streams: []grpc.StreamDesc{
			stream("Down", s.down, true, false),
			stream("Up", s.up, false, true),
			stream("Both", s.both, true, true),
		},
	}
}

// withScript puts a script, and more metadata, beside a call.
func withScript(ctx context.Context, script Script, more ...string) context.Context {
	text, err := json.Marshal(script)
	if err != nil {
		panic(fmt.Sprintf("script: %v", err))
	}
	return metadata.AppendToOutgoingContext(ctx, append([]string{scriptKey, string(text)}, more...)...)
}
